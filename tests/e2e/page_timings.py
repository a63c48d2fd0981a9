"""How fast a session of 1,000 turns with messages of 4 MB is shown: `PYTHONPATH=tests python -m e2e.page_timings`."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from integration.stand import standing, user
from playwright.sync_api import Page, Request

from e2e.page import launched

TURNS = 1_000
LARGE = 4_000_000
RUNS = 5
CONTENT = ".said, .act .what:not(:empty)"

SCROLLED = """async () => {
  const able = [...document.querySelectorAll("main, main *")].filter(
    (one) => one.scrollHeight > one.clientHeight + 200 && /auto|scroll/.test(getComputedStyle(one).overflowY));
  const scroller = able.sort((one, other) => other.scrollHeight - one.scrollHeight)[0];
  const frames = [];
  let before = await new Promise(requestAnimationFrame);
  for (let step = 1; step <= 60; step++) {
    scroller.scrollTop = (step / 60) * (scroller.scrollHeight - scroller.clientHeight);
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - before);
    before = now;
  }
  return frames;
}"""
"""Milliseconds of each frame while what can be scrolled furthest is scrolled from its top to its end."""


def main() -> None:
    with tempfile.TemporaryDirectory() as root, standing(Path(root)) as stand, launched() as browser:
        talk = stand.talk(session_id="long")
        quick = {"latency_s": 0, "completion_tokens": 2}
        for number in range(TURNS):
            size = LARGE if number >= TURNS - 2 else 20
            assert talk.add(user("word " * (size // 5)), sim=quick).status_code == 200
        for name, turn in (("first turn", 1), ("turn of 4 MB", TURNS - 1)):
            figures = [_opened(browser.new_page(), stand.server.base_url, turn) for _ in range(RUNS)]
            median = {key: round(statistics.median(one[key] for one in figures), 1) for key in figures[0]}
            print(json.dumps({"opened at": name, **median}), flush=True)


def _opened(page: Page, base_url: str, turn: int) -> dict[str, float]:
    """Milliseconds to the first content, bytes that were read by then, elements, and frames while it is scrolled."""
    page.set_viewport_size({"width": 1440, "height": 900})
    read: list[int] = []

    def finished(request: Request) -> None:
        if "/api/" in request.url:
            read.append(request.sizes()["responseBodySize"])

    page.on("requestfinished", finished)
    page.goto(f"{base_url}/ui#/session/long?turn={turn}")
    page.wait_for_selector(CONTENT)
    first_ms: float = page.evaluate("performance.now()")
    page.wait_for_timeout(1_500)
    page.remove_listener("requestfinished", finished)
    frames: list[float] = sorted(page.evaluate(SCROLLED))
    elements: int = page.evaluate("document.querySelectorAll('*').length")
    page.close()
    return {
        "first content ms": first_ms,
        "read KiB": sum(read) / 1024,
        "elements": elements,
        "frame p50 ms": statistics.median(frames),
        "frame p95 ms": frames[int(len(frames) * 0.95)],
        "frame max ms": frames[-1],
    }


if __name__ == "__main__":
    main()
