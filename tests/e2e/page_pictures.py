"""The pictures of docs/page: `PYTHONPATH=tests python -m e2e.page_pictures FOLDER [--all]`.

Those of the documentation, or with `--all` a sheet of each view, light and dark and in three widths, to be looked at.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from integration.stand import Stand, serving, standing, until
from PIL import Image
from playwright.sync_api import Browser, Page

from e2e.page import launched, page_standing
from e2e.page_data import CHECKPOINT, rollouts
from e2e.page_story import STORY, keep, story

VIEWS = {
    "sessions": "#/",
    "stuck": "#/?state=claimed&sort=claimed_since&order=asc",
    "groups": "#/groups",
    "group": "#/group/gsm8k%2Ftrain-04127",
    "flat": "#/group/swe%2Fdjango-11099",
    "versions": "#/versions",
    "search": "#/search?q=order",
    "exports": "#/exports?max_staleness=0&weight_version=12",
    "nothing": "#/?q=nobody",
    "tree": "#/session/deep-research-5",
    "rollouts": "#/group/retail%2Forder-17/rollouts?sort=best",
    "diff": "#/group/retail%2Forder-17/rollouts?diff=retail-00,retail-03",
    "checkpoints": "#/checkpoints",
    "checkpoint": f"#/checkpoint/{CHECKPOINT}",
}
LOOKED_AT = {
    **{name: hash for name, hash in VIEWS.items() if name != "search"},
    "engines": "#/",
    "columns": "#/?columns=task,harness&metadata=harness%3Ddemo",
    "picked": "#/rollouts?sessions=retail-00,retail-03",
    "session": f"#/session/{STORY}",
    "note": f"#/session/{STORY}",
    "turn": f"#/session/{STORY}?turn=3",
    "past": f"#/session/{STORY}?seq=12",
    "tokens": f"#/session/{STORY}/tokens?branch=0",
    "keys": "#/groups",
    "unknown": "#/session/nobody",
    "unknowngroup": "#/group/nobody",
    "nowhere": "#/nowhere",
}
"""The views of `--all`; those of the search and of signing in have stands of their own."""

PRESSED: Mapping[str, Callable[[Page], None]] = {
    "engines": lambda page: page.click(".engines summary"),
    "note": lambda page: page.get_by_role("button", name="Edit note").click(),
    "keys": lambda page: page.keyboard.press("?"),
}
"""What is pressed before the picture."""

SIZES = ((1440, 900, 0.55), (768, 1024, 0.6), (390, 844, 0.72))
"""Width and height of a window, and the scale of its picture on a sheet."""

DOCUMENTED = (("sessions", "light"), ("group", "light"), ("rollouts", "light"), ("tree", "light"))
BUSY_S = 12.0
"""So long the server works before the pictures: the dead engine is known as such then."""

SHOWN_MS = 700


class _Folders:
    """As pytest makes them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def mktemp(self, name: str) -> Path:
        made = self._root / name
        made.mkdir()
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, page_standing(_Folders(Path(root))) as page, launched() as browser:
        shown = opened(browser, page.stand.server.base_url)
        work(page.stand)
        rollouts(page.stand)
        if arguments.all:
            story(page.stand)
            sheets(browser, page.stand.server.base_url, LOOKED_AT, folder)
            sign_in(browser, folder)
            search(browser, folder)
        else:
            for name, scheme in DOCUMENTED:
                take(shown, name, scheme, folder / f"{name}-{scheme}.png")


def sheets(browser: Browser, base_url: str, views: Mapping[str, str], folder: Path) -> None:
    """A sheet of each view: wide ones above, narrow ones below, light beside dark."""
    pictures: dict[str, list[Image.Image]] = {name: [] for name in views}
    for width, height, scale in SIZES:
        page = opened(browser, base_url, width, height)
        for name, hash in views.items():
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
                page.goto("about:blank")
                page.goto(f"{base_url}/ui{hash}")
                page.wait_for_timeout(SHOWN_MS)
                PRESSED.get(name, lambda _: None)(page)
                page.wait_for_timeout(SHOWN_MS // 2)
                overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                if overflow:
                    print(f"{name} at {width}: {overflow} px too wide")
                taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                pictures[name].append(taken.resize((int(width * scale), int(height * scale)), Image.Resampling.LANCZOS))
        page.context.close()
    for name, taken in pictures.items():
        wide, narrow = taken[:2], taken[2:]
        sheet = Image.new("RGB", (10 + max(sum(one.width + 10 for one in row) for row in (wide, narrow)), 1150), "gray")
        for row, top in ((wide, 10), (narrow, 20 + wide[0].height)):
            left = 10
            for one in row:
                sheet.paste(one, (left, top))
                left += one.width + 10
        sheet.save(folder / f"{name}.png")


def sign_in(browser: Browser, folder: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as root,
        serving(Path(root), environment={"TURNLOG_ADMIN_TOKEN": "x" * 32}) as stand,
    ):
        sheets(browser, stand.server.base_url, {"signin": "#/"}, folder)


def search(browser: Browser, folder: Path) -> None:
    searched = {"TURNLOG_SEARCH": "on"}
    with tempfile.TemporaryDirectory() as root, standing(Path(root), environment=searched) as stand:
        rollouts(stand)
        until(lambda: stand.http.get("/search", params={"q": "order"}).json()["is_current"])
        sheets(browser, stand.server.base_url, {"search": VIEWS["search"]}, folder)


def opened(browser: Browser, base_url: str, width: int = 1200, height: int = 700) -> Page:
    page = browser.new_context(viewport={"width": width, "height": height}).new_page()
    page.on("console", lambda message: print(message.type, message.text))
    page.on("pageerror", lambda error: print(error))
    page.goto(f"{base_url}/ui")
    return page


def work(stand: Stand) -> None:
    """Turns of some agents, as fast or slow as they come."""
    ended = time.monotonic() + BUSY_S
    talks = [
        stand.talk(session_id=f"agent-{number}", group_id="swe/sympy-20590", attempt=number) for number in range(5)
    ]
    while time.monotonic() < ended:
        for number, talk in enumerate(talks):
            talk.say(f"Go on, agent {number}.", max_tokens=12)
            time.sleep(0.05 * (number % 3))


def take(page: Page, name: str, scheme: str, to: Path) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.evaluate("hash => { location.hash = hash }", VIEWS[name])
    page.wait_for_timeout(SHOWN_MS)
    page.evaluate("document.querySelector('.withtree')?.scrollIntoView({block: 'end'})")
    keep(page, to)


if __name__ == "__main__":
    main()
