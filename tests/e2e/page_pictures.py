"""The pictures of docs/page: `PYTHONPATH=tests python -m e2e.page_pictures FOLDER [--all]`.

Those of the documentation, or with `--all` each view in light and dark and in three widths, to be looked at.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from integration.stand import Stand, standing, until
from playwright.sync_api import Browser, Page

from e2e.page import launched, page_standing
from e2e.page_data import over_hours, rollouts
from e2e.page_story import keep

VIEWS = {
    "sessions": "#/",
    "stuck": "#/?state=claimed&sort=claimed_since&order=asc",
    "groups": "#/groups",
    "group": "#/group/gsm8k%2Ftrain-04127",
    "flat": "#/group/swe%2Fdjango-11099",
    "trends": "#/trends",
    "search": "#/search?q=order",
    "exports": "#/exports?max_staleness=0&weight_version=12",
    "nothing": "#/?q=nobody",
    "tree": "#/session/deep-research-5",
    "rollouts": "#/group/retail%2Forder-17/rollouts?sort=best",
    "diff": "#/group/retail%2Forder-17/rollouts?diff=retail-00,retail-03",
    "compared": "#/session/deep-research-5?branch=0&against=2",
}
DOCUMENTED = (
    ("sessions", "light"),
    ("sessions", "dark"),
    ("groups", "light"),
    ("group", "light"),
    ("rollouts", "light"),
    ("diff", "light"),
    ("exports", "light"),
    ("tree", "light"),
    ("compared", "light"),
)
BUSY_S = 12.0
"""So long the server works before the pictures: the dead engine is known as such then, and the sparkline is a line."""

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
    every = [(name, scheme) for name in VIEWS for scheme in ("light", "dark")]
    with tempfile.TemporaryDirectory() as root, page_standing(_Folders(Path(root))) as page, launched() as browser:
        shown = opened(browser, page.stand.server.base_url)
        work(page.stand)
        rollouts(page.stand)
        for name, scheme in every if arguments.all else DOCUMENTED:
            take(shown, name, scheme, folder / f"{name}-{scheme}.png")
        trends(browser, folder, arguments.all)
        for width, height in ((1440, 900), (768, 1024), (390, 844)) if arguments.all else ():
            shown.set_viewport_size({"width": width, "height": height})
            for name in VIEWS:
                take(shown, name, "light", folder / f"{name}-{width}.png")


def trends(browser: Browser, folder: Path, both: bool) -> None:
    """Of a run of its own, whose times are hours apart."""
    searched = {"TURNLOG_SEARCH": "on"}
    with tempfile.TemporaryDirectory() as root, standing(Path(root), environment=searched) as stand:
        rollouts(stand)
        over_hours(stand)
        until(lambda: stand.http.get("/search", params={"q": "order"}).json()["is_current"])
        page = opened(browser, stand.server.base_url)
        for name in ("trends", "search"):
            for scheme in ("light", "dark") if both else ("light",):
                take(page, name, scheme, folder / f"{name}-{scheme}.png")


def opened(browser: Browser, base_url: str) -> Page:
    page = browser.new_context(viewport={"width": 1200, "height": 700}).new_page()
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
