"""One session in which everything happens that its views show, and their pictures in docs/page.

`PYTHONPATH=tests python -m e2e.page_story FOLDER [--all]`
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path

from integration.stand import WEATHER, Stand, Talk, standing, user
from PIL import Image
from playwright.sync_api import Page

from e2e.page import launched

STORY = "weather-17.2"
FORECAST = json.dumps({"city": "Bonn", "days": [{"celsius": 12, "rain": 0.1}, {"celsius": 9, "rain": 0.8}]}, indent=1)
NOW = {"latency_s": 0.02}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, standing(Path(root)) as stand, launched() as browser:
        story(stand)
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": 1200, "height": 1000}, color_scheme=scheme)
            page = context.new_page()
            page.on("console", lambda message: print(message.type, message.text))
            page.on("pageerror", lambda error: print(error))
            for name, show in VIEWS.items():
                if arguments.all or (name, scheme) in DOCUMENTED:
                    show(page, f"{stand.server.base_url}/ui#/session/{STORY}")
                    keep(page, arguments.folder / f"{name}-{scheme}.png")
            context.close()


def _now(page: Page, address: str) -> None:
    """With the times of one turn explained."""
    page.goto(address)
    page.wait_for_selector(".events li:nth-child(20)")
    page.hover(".timeline tbody tr:nth-child(8) .stages")


def _past(page: Page, address: str) -> None:
    """Before the rollback."""
    page.goto(f"{address}?seq=12")
    page.wait_for_selector(".events .here")
    page.wait_for_selector(".said")


def _tokens(page: Page, address: str) -> None:
    page.goto(f"{address}/tokens?branch=0")
    page.locator(".tokens .tok:not(.prompt)").nth(30).focus()
    page.mouse.move(0, 0)
    page.wait_for_selector(".tokendetail strong")
    page.evaluate("document.querySelector('main').scrollTop = 0")


VIEWS = {"session": _now, "session-past": _past, "tokens": _tokens}
DOCUMENTED = (("session", "light"), ("tokens", "light"), ("tokens", "dark"))


def keep(page: Page, to: Path) -> None:
    """With a palette, which is a third of the bytes; one that covers rare colours, too, such as a legend's."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(to, optimize=True)


if __name__ == "__main__":
    main()
