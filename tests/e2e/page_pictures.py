"""The pictures of docs/page: `PYTHONPATH=tests python -m e2e.page_pictures FOLDER`."""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from pathlib import Path

from integration.stand import WEATHER, Stand, Talk, standing, user
from PIL import Image
from playwright.sync_api import Browser, Page

from e2e.page import launched, page_standing
from e2e.page_data import rollouts

VIEWS = {
    "sessions": "#/",
    "group": "#/group/gsm8k%2Ftrain-04127",
    "rollouts": "#/group/retail%2Forder-17/rollouts?sort=best",
    "tree": "#/session/deep-research-5",
}
BUSY_S = 12.0
"""So long the server works before the pictures: the dead engine is known as such then."""

SHOWN_MS = 700


STORY = "weather-17.2"
FORECAST = json.dumps({"city": "Bonn", "days": [{"celsius": 12, "rain": 0.1}, {"celsius": 9, "rain": 0.8}]}, indent=1)
NOW = {"latency_s": 0.02}


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
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, page_standing(_Folders(Path(root))) as made, launched() as browser:
        page = opened(browser, made.stand.server.base_url)
        work(made.stand)
        rollouts(made.stand)
        for name in VIEWS:
            take(page, name, folder / f"{name}-light.png")
        with standing(Path(root) / "story") as stand:
            story(stand)
            page = opened(browser, stand.server.base_url, 1200, 1000)
            address = f"{stand.server.base_url}/ui#/session/{STORY}"
            _session(page, address)
            keep(page, folder / "session-light.png")
            _tokens(page, address)
            keep(page, folder / "tokens-light.png")


def story(stand: Stand) -> Talk:
    """Tools, reasoning, refused replies, weights that change within a turn, a rollback, a summary as a new segment."""
    labels = {"task": "weather/bonn", "seed": 7, "harness": "demo"}
    talk = stand.talk(
        session_id=STORY,
        group_id="weather-17",
        attempt=2,
        rollback_window=2,
        on_divergence="segment",
        metadata=labels,
    )
    rules = {"role": "system", "content": "You are a careful agent. Use the tools and answer in short sentences."}
    question = user("What will the weather in Bonn be in the next two days, and should I take an umbrella?")
    wish = {**NOW, "weight_version": "12"}
    called = talk.add(rules, question, tools=[WEATHER], sim={**wish, "tool_calls": True, "reasoning": True})
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": FORECAST}
        for call in called.json()["choices"][0]["message"]["tool_calls"]
    ]
    talk.add(*results, tools=[WEATHER], sim={**wish, "completion_tokens": 60, "tool_calls": False, "reasoning": True})
    history = list(talk.messages)
    for fault in ("not_json", "status_500"):
        refused = talk.chat([*history, user("And Cologne?")], tools=[WEATHER], sim={**NOW, "fault": fault})
        assert refused.status_code >= 500, refused.text
    talk.say(
        "And Cologne? Is it the same?",
        tools=[WEATHER],
        sim={**NOW, "completion_tokens": 90, "tool_calls": False, "weight_version": "12"},
    )
    talk.messages = history
    changing = {**NOW, "completion_tokens": 120, "tool_calls": False, "weight_versions": ["12", "13"]}
    talk.say("And Cologne, in one sentence?", tools=[WEATHER], sim=changing)
    slow = {"latency_s": 0.15, "completion_tokens": 240, "tool_calls": False, "weight_version": "13"}
    talk.say("Compare both cities. " + "Think about it once more. " * 120, tools=[WEATHER], sim=slow)
    summary = user("Summary of what was said so far: it rains in Bonn, less so in Cologne. Go on from here.")
    last = talk.chat([summary], sim={**NOW, "completion_tokens": 50, "weight_version": "14"})
    assert last.status_code == 200, last.text
    reward = {"reward": 0.75, "components": {"correct": 1.0, "length": -0.25}}
    assert stand.http.put(f"{talk.path}/reward", json=reward).status_code == 200
    return talk


def _session(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".said")


def _tokens(page: Page, address: str) -> None:
    page.goto(f"{address}?tab=tokens&branch=0")
    page.locator(".tokens .tok:not(.prompt)").nth(30).focus()
    page.mouse.move(0, 0)
    page.wait_for_selector(".tokendetail strong")
    page.evaluate("document.querySelector('main').scrollTop = 0")


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


def take(page: Page, name: str, to: Path) -> None:
    page.evaluate("hash => { location.hash = hash }", VIEWS[name])
    page.wait_for_timeout(SHOWN_MS)
    page.evaluate("document.querySelector('.withtree')?.scrollIntoView({block: 'end'})")
    keep(page, to)


def keep(page: Page, to: Path) -> None:
    """With a palette, which is a third of the bytes; one that covers rare colours, too, such as a legend's."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(to, optimize=True)


if __name__ == "__main__":
    main()
