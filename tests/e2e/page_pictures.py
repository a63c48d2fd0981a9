"""Every view of the page over the store of `turnlog demo --full`, and what axe finds there:
`PYTHONPATH=tests python -m e2e.page_pictures FOLDER`; with `--docs` the pictures of docs/page alone.
"""

from __future__ import annotations

import argparse
import io
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize

from e2e.page import barriers, launched
from e2e.page_data import RUN, trained
from ops.demo.full import full_store

GROUP, TREE = "swe%2Fdurations-141", "research-reefs-01"
VIEWS = {
    "runs": "#/runs",
    "run": f"#/runs?run={RUN}",
    "paused": "#/runs?run=maze-1b",
    "sessions": "#/",
    "session": "#/session/swe-durations-04?turn=8",
    "running": "#/session/swe-durations-11",
    "tokens": "#/session/math-squares-03?tab=tokens",
    "events": "#/session/swe-durations-02?tab=events",
    "tree": f"#/session/{TREE}?tab=tree",
    "groups": "#/groups",
    "group": f"#/group/{GROUP}",
    "rollouts": f"#/group/{GROUP}/rollouts",
    "search": "#/search?q=minutes",
    "exports": "#/exports?shape=slime",
    "checkpoints": "#/checkpoints",
    "checkpoint": "#/checkpoint/weights-41",
}
IN_DOCS = ("run", "sessions", "session", "tokens", "tree", "group", "rollouts")
SIZES = {1440: 900, 390: 844}
SHOWN_MS = 1500
Scheme = Literal["light", "dark"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, full_store(Path(root)) as store, launched() as browser:
        _add_runs(store.base_url)
        for name, width, scheme in _wanted(is_for_docs=given.docs):
            page = opened(browser, width, scheme)
            page.goto(f"{store.base_url}/ui{VIEWS[name]}")
            page.wait_for_timeout(SHOWN_MS)
            keep(page, given.folder / (f"{name}-light.png" if given.docs else f"{name}-{width}-{scheme}.png"))
            if not given.docs:
                for found in barriers(page):
                    print(f"{name} {width} {scheme}: {found}")
            page.context.close()


def _add_runs(base_url: str) -> None:
    """Two runs, of which one is paused."""
    with httpx.Client(base_url=base_url, trust_env=False, timeout=60) as http:
        trained(http, RUN, range(30, 42))
        http.put(f"/runs/{RUN}", json={"limits": {"tokens": 2500}, "note": "baseline, seed 1"}).raise_for_status()
        trained(http, "maze-1b", range(30, 35), slope=0.0)
        http.post("/runs/maze-1b/fleet/pause", json={"lease_s": 3600}).raise_for_status()


def _wanted(*, is_for_docs: bool) -> Iterator[tuple[str, int, Scheme]]:
    if is_for_docs:
        yield from ((name, 1440, "light") for name in IN_DOCS)
        return
    yield from itertools.product(VIEWS, SIZES, get_args(Scheme))


def opened(browser: Browser, width: int, scheme: Scheme) -> Page:
    size: ViewportSize = {"width": width, "height": SIZES[width]}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.on("console", lambda message: print(message.type, message.text))
    page.on("pageerror", lambda error: print(error))
    return page


def keep(page: Page, to: Path) -> None:
    """With a palette, which is a third of the bytes; one that covers rare colours, too, such as a legend's."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(to, optimize=True)


if __name__ == "__main__":
    main()
