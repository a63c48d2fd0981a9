"""Every view of the page over the store of `turnlog demo --full`, in each size and scheme, and what axe finds there:
`PYTHONPATH=tests python -m e2e.page_pictures FOLDER`; with `--docs` the pictures of README and docs/page.md alone.
"""

from __future__ import annotations

import argparse
import io
import itertools
import tempfile
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
    "sessions": "#/?run=default",
    "session": "#/session/swe-durations-03?turn=5",
    "running": "#/session/swe-durations-11",
    "tokens": "#/session/math-squares-03?tab=tokens",
    "events": "#/session/swe-durations-02?tab=events",
    "tree": f"#/session/{TREE}?tab=tree",
    "groups": "#/groups",
    "group": f"#/group/{GROUP}",
    "rollouts": f"#/group/{GROUP}/rollouts",
    "judge": f"#/judge?group_id={GROUP}",
    "search": "#/search?q=minutes",
    "exports": "#/exports?shape=slime",
    "checkpoints": "#/checkpoints",
    "checkpoint": "#/checkpoint/weights-41",
}
IN_DOCS = ("run", "sessions", "session", "tokens", "tree", "group", "rollouts")
SIZES = {1280: 800, 1920: 1080, 390: 844}
DOCS_WIDTH = 1280
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
        if given.docs:
            for name in IN_DOCS:
                page = opened(browser, store.base_url, name, DOCS_WIDTH)
                keep(page, given.folder / f"{name}-light.png")
                page.context.close()
            return
        for name, width in itertools.product(VIEWS, SIZES):
            page = opened(browser, store.base_url, name, width)
            for scheme in get_args(Scheme):
                page.emulate_media(color_scheme=scheme)
                keep(page, given.folder / f"{name}-{width}-{scheme}.png")
                for found in barriers(page, of_colours=scheme == "dark"):
                    print(f"{name} {width} {scheme}: {found}")
            page.context.close()


def _add_runs(base_url: str) -> None:
    """Two runs, of which one is paused."""
    with httpx.Client(base_url=base_url, trust_env=False, timeout=60) as http:
        trained(http, RUN, range(30, 42))
        http.put(f"/runs/{RUN}", json={"limits": {"tokens": 2500}, "note": "baseline, seed 1"}).raise_for_status()
        trained(http, "maze-1b", range(30, 35), slope=0.0)
        http.post("/runs/maze-1b/fleet/pause", json={"lease_s": 3600}).raise_for_status()


def opened(browser: Browser, base_url: str, name: str, width: int) -> Page:
    size: ViewportSize = {"width": width, "height": SIZES[width]}
    page = browser.new_context(viewport=size).new_page()
    page.on("console", lambda message: print(message.type, message.text))
    page.on("pageerror", lambda error: print(error))
    page.goto(f"{base_url}/ui{VIEWS[name]}")
    page.wait_for_timeout(SHOWN_MS)
    return page


def keep(page: Page, to: Path) -> None:
    """With a palette, which is a third of the bytes; one that covers rare colours, too, such as a legend's."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(to, optimize=True)


if __name__ == "__main__":
    main()
