"""A session's views in a real Chromium: its turns, conversation, log and tokens, now and as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from integration.stand import WEATHER, Stand, Talk, standing, until, user

from e2e.page import PageStand, Watched, barriers, require_chromium

pytestmark = pytest.mark.long

PAGE = 2000
NOW = {"latency_s": 0}
HOSTILE = "<img src=x onerror=window.__pwned=1><script>window.__pwned=1</script>"
MARKUP = "<b onclick=alert(1)>bold</b> javascript:alert(1) {{7*7}}"
UNSEEN = "a\u202eb \u0000c \u001b[31md \u200be\U000e0041"
SHOWN = "aU+202Eb NULc ESC[31md U+200BeU+E0041"

LONG = "n" * 5000

DOT = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""A picture of one pixel."""

Watch = Callable[..., Watched]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """An engine that answers at once."""
    require_chromium()
    environment = {"TURNLOG_ROLLBACK_WINDOW": "3"}
    with standing(tmp_path_factory.mktemp("page"), "--seed", "3", "--reasoning", "0", environment=environment) as made:
        yield made


def _texts(watched: Watched, selector: str) -> list[str]:
    return watched.page.locator(selector).all_inner_texts()


def _at(talk: Talk, **query: Any) -> str:
    return f"#/session/{quote(talk.id)}" + (
        "?" + "&".join(f"{key}={value}" for key, value in query.items()) if query else ""
    )


def test_a_session_with_its_rollback_in_place(page_stand: PageStand, watch: Watch) -> None:
    watched = watch(page_stand.stand.server.base_url)
    page = watched.open(f"#/session/{page_stand.filled.rolled_back}")
    page.wait_for_selector(".said")
    states = _texts(watched, ".timeline tbody tr td:nth-child(2)")
    assert [state.split()[0].strip("●·▲") or state.split()[1] for state in states] == [
        "committed",
        "discarded",
        "rolled",
        "committed",
    ]
    assert "turn 2 discarded by event" in _texts(watched, ".timeline tr.rollback")[0]
    assert page.locator(".sessionfacts .badge").inner_text().split()[-3:] == ["1", "rolled", "back"]
    assert "Write a chess engine." in _texts(watched, ".conversation")[0]
    assert "Now test it." not in _texts(watched, ".conversation")[0]
    page.get_by_role("button", name="turn 2, discarded: read its conversation").click()
    page.get_by_text("Turn 2 was discarded by event").wait_for()
    assert "Now test it." in _texts(watched, ".conversation")[0]
    assert "turn=2" in page.evaluate("location.hash")


def test_the_tokens_and_limits_in_the_head_are_the_sessions(stand: Stand, watch: Watch) -> None:
    talk = stand.talk(history="tree", limits={"turns": 3, "tokens": 5000, "context": 9000})
    talk.say("One", sim=NOW)
    first = list(talk.messages)
    talk.say("Two", sim=NOW)
    talk.messages = first
    talk.say("Else", sim=NOW)
    turns = [event for event in talk.events() if event["type"] == "TurnCommitted"]
    sampled, prompt = (sum(turn[name] for turn in turns) for name in ("output_tokens", "suffix_tokens"))
    watched = watch(stand.server.base_url)
    watched.open(_at(talk)).wait_for_selector(".said")
    told = next(text for text in _texts(watched, ".sessionfacts div") if text.startswith("Tokens"))
    assert told.removeprefix("Tokens").strip() == f"{sampled + prompt} of live turns, each once; {sampled} sampled"
    assert talk.chat([user("One more")], sim=NOW).status_code == 409
    watched.page.get_by_text("Limit reached").wait_for()
    [told] = [text for text in _texts(watched, ".sessionfacts div") if text.startswith("Limits")]
    used = f"3 of 3 turns, 0 left; {sampled} of 5,000 tokens, {5000 - sampled:,} left; context 9,000 per rollout"
    assert told.removeprefix("Limits").strip() == used


def test_refused_turns_say_why(page_stand: PageStand, watch: Watch) -> None:
    watched = watch(page_stand.stand.server.base_url, scheme="dark")
    page = watched.open(f"#/session/{page_stand.filled.refused}")
    page.wait_for_selector(".timeline tr.failed")
    engine, invalid = _texts(watched, ".timeline tr.failed")
    assert "engine_error 500" in engine.replace("\t", " ")
    assert "upstream_invalid" in invalid
    assert "the body is not valid JSON" in invalid
    assert "the reply's first" in invalid


def test_an_erased_session_is_a_skeleton(page_stand: PageStand, watch: Watch) -> None:
    watched = watch(page_stand.stand.server.base_url)
    page = watched.open(f"#/session/{page_stand.filled.erased}")
    page.wait_for_selector(".events li")
    assert "erased" in _texts(watched, "h1 + .badge")[0]
    assert [text.split()[0] for text in _texts(watched, ".events summary")] == [
        "SessionCreated",
        "SessionClosed",
        "SessionErased",
    ]


def test_time_travel(stand: Stand, watch: Watch) -> None:
    talk = stand.talk(metadata={"task": "travel"})
    for text in ("one", "two", "three"):
        talk.say(text, sim=NOW)
    watched = watch(stand.server.base_url)
    page = watched.open(_at(talk, seq=4))
    page.wait_for_selector(".said")
    assert "as of event 4" in _texts(watched, ".panelhead")[0]
    assert len(_texts(watched, ".timeline tbody tr")) == 1
    assert "two" not in _texts(watched, ".conversation")[0]
    page.get_by_label("event, of this session's log").press("ArrowRight")
    page.locator(".timeline tr.open").wait_for()
    until(lambda: page.evaluate("location.hash").endswith("seq=5"))
    page.get_by_label("event number").fill("6")
    page.get_by_label("event number").press("Enter")
    page.locator(".said[data-role=user]", has_text="two").wait_for()
    assert page.locator(".events .here").get_attribute("data-seq") == "6"
    assert page.locator(".events .later").count() == 2
    page.locator(".events a", has_text="2").first.click()
    until(lambda: page.locator(".said").count() == 0)
    page.get_by_role("button", name="live", exact=True).click()
    page.locator(".said[data-role=user]", has_text="three").wait_for()
    assert page.evaluate("location.hash") == _at(talk)


def test_a_fork_leads_to_the_turn_that_it_began_after(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    for text in ("one", "two"):
        talk.say(text, sim=NOW)
    made = stand.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    watched = watch(stand.server.base_url)
    page = watched.open(_at(stand.known(made[0]["session_id"])))
    page.locator(".said[data-role=user]", has_text="one").wait_for()
    told = next(text for text in _texts(watched, ".sessionfacts div") if "Forked from" in text)
    assert told.endswith(f"{talk.id} after turn 1 its turns are context")
    page.locator(".sessionfacts a", has_text=talk.id).click()
    until(lambda: page.evaluate("location.hash").startswith(_at(talk, turn=1)))
    page.locator(".timeline tbody tr").nth(1).wait_for()


def test_the_log_is_followed_live(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    watched = watch(stand.server.base_url)
    page = watched.open(_at(talk))
    page.get_by_text("No turn is committed yet.").wait_for()
    talk.say("while you look", sim=NOW)
    page.locator(".events li", has_text="TurnCommitted").wait_for()
    page.locator(".said", has_text="while you look").wait_for()
    page.get_by_role("button", name="turn 1: read its conversation").wait_for()
    page.get_by_role("button", name="pause").click()
    talk.say("and not", sim=NOW)
    page.locator(".said", has_text="and not").wait_for()
    assert page.locator(".events li", has_text="TurnCommitted").count() == 1
    page.get_by_role("button", name="pause").click()
    until(lambda: page.locator(".events li", has_text="TurnCommitted").count() == 2)
    page.locator(".events summary", has_text="SessionCreated").click()
    assert '"rollback_window": 3' in page.locator(".events pre").inner_text()


def test_a_session_that_is_followed_keeps_the_document_small(stand: Stand, watch: Watch) -> None:
    """Once it shows as many turns, messages and events as it may, each new one takes the place of another."""
    talk = stand.talk()
    quick = {**NOW, "completion_tokens": 2}
    for number in range(160):
        talk.say(str(number), sim=quick)
    page = watch(stand.server.base_url).open(_at(talk))
    inspector = page.context.new_cdp_session(page)
    inspector.send("Performance.enable")
    kept = []
    for number in range(20):
        talk.say(f"later {number}", sim=quick)
        page.locator(".events li", has_text=f"TurnCommitted turn {161 + number} ").wait_for()
        if number % 10 == 9:
            page.locator(".said", has_text=f"later {number}").wait_for()
            inspector.send("HeapProfiler.collectGarbage")
            metrics = inspector.send("Performance.getMetrics")["metrics"]
            kept.append(int(next(one["value"] for one in metrics if one["name"] == "Nodes")))
    assert abs(kept[1] - kept[0]) < 100, kept


def test_hostile_content_is_text(stand: Stand, watch: Watch) -> None:
    talk = stand.talk(metadata={HOSTILE: MARKUP}, adapter=HOSTILE, group_id=f"{HOSTILE}{MARKUP}")
    tool = {"type": "function", "function": {"name": HOSTILE, "parameters": {**WEATHER["function"]["parameters"]}}}
    talk.say(HOSTILE, sim={**NOW, "text": HOSTILE, "finish_reason": HOSTILE, "weight_version": HOSTILE})
    called = talk.say(UNSEEN, tools=[tool], sim={**NOW, "tool_calls": True}).json()["choices"][0]["message"]
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "name": HOSTILE, "content": MARKUP}
        for call in called["tool_calls"]
    ]
    lone = {
        "id": HOSTILE,
        "type": "function",
        "function": {"name": MARKUP + LONG, "arguments": '{"half": "\\ud800", "a": 1}'},
    }
    pictures = [
        {"type": "image_url", "image_url": {"url": "http://192.0.2.7/beacon.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg onload=window.__pwned=1>"}},
        {"type": HOSTILE, "html": HOSTILE},
    ]
    said = {"role": "assistant", "content": None, "reasoning_content": HOSTILE, "tool_calls": [lone], "odd": HOSTILE}
    result = {"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE + "x" * 300_000}
    talk.add(*answers, said, result, {"role": "user", "content": pictures}, sim={**NOW, "reasoning": True})
    refused = talk.chat([*talk.messages, user("?")], sim={"fault": {"fault": "status_500", "message": HOSTILE}})
    assert refused.status_code == 500
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1, "components": {HOSTILE: 1}}).status_code == 200

    watched = watch(stand.server.base_url)
    page = watched.open(_at(talk))
    page.locator(".said").last.wait_for()
    for details in page.locator("main details").all():
        details.evaluate("one => { one.open = true }")
    page.get_by_role("button", name="show ").first.click()
    shown = page.locator("main").text_content() or ""  # innerText leaves out what is out of sight
    assert shown.count(HOSTILE) > 20
    assert MARKUP in shown
    assert LONG not in shown
    assert "… (5056 characters)" in shown
    assert SHOWN in shown
    assert '"half": "\\ud800"' in shown
    assert "x" * 200_000 in shown
    assert "http://192.0.2.7/beacon.png" in shown
    assert "image: image/svg+xml" in shown
    assert page.locator("main :is(img, script, iframe, object, embed, b, [onclick], [onerror])").count() == 0
    assert page.locator("main a:not([href^='#']):not([href*='/rejected/'])").count() == 0
    watched.go(f"{_at(talk)}/tokens?branch=0")
    page.mouse.move(0, 0)
    page.locator(".tokens .tok").first.focus()
    page.locator(".tokendetail", has_text="position 0").wait_for()
    assert f"weights {HOSTILE}" in page.locator(".tokens").inner_text()
    assert page.locator("main :is(img, script, b)").count() == 0


def test_many_turns_are_paged(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    for number in range(104):
        talk.say(str(number), sim={**NOW, "completion_tokens": 2})
    watched = watch(stand.server.base_url)
    page = watched.open(_at(talk))
    page.get_by_text("5 to 104 of 104").wait_for()
    page.get_by_role("button", name="earlier", exact=True).click()
    page.get_by_text("1 to 100 of 104").wait_for()
    page.get_by_role("button", name="show 8 earlier of 8").click()
    until(lambda: page.locator(".said").count() == 208)


def test_tokens_with_their_masks_versions_and_branches(stand: Stand, watch: Watch) -> None:
    talk = stand.talk(on_divergence="segment", rollback_window=0)
    long = " ".join(["word"] * 2 * PAGE)
    talk.say(long, sim={**NOW, "completion_tokens": 40, "weight_versions": ["7", "8"]})
    talk.say("more", sim={**NOW, "completion_tokens": 20, "weight_version": "8"})
    assert talk.chat([user("a summary")], sim={**NOW, "weight_version": "9"}).status_code == 200
    talk.column(1, "teacher", [-0.125, *[None] * 39])
    row = next(row for row in talk.rows() if row["segment"] == 0)
    first = row["loss_mask"].index(1)

    watched = watch(stand.server.base_url)
    page = watched.open(f"{_at(talk)}/tokens")
    page.get_by_text("Branch 1 began because its messages continue no stored turn.").wait_for()
    page.get_by_role("link", name="branch 0").click()
    until(lambda: page.locator(".tokens .tok").count() == PAGE)
    assert page.evaluate("document.querySelectorAll('*').length") < 2 * PAGE
    page.get_by_role("button", name="weights 7 from").click()
    cell = page.locator(f".tokens .tok[data-at='{first}']")
    cell.wait_for()
    until(lambda: cell.evaluate("one => one === document.activeElement"))
    detail = page.locator(".tokendetail").inner_text()
    assert f"position {first:,} · id {row['tokens'][first]}" in detail
    assert "sampled, in the loss" in detail
    assert f"logprob {row['logprobs'][first]:.6f}" in detail
    assert "weights 7" in detail
    assert "teacher -0.125" in detail
    page.keyboard.press("ArrowLeft")
    page.locator(".tokendetail", has_text="not sampled, not in the loss").wait_for()
    page.keyboard.press("Home")
    page.locator(".tokendetail", has_text="position 0 ").wait_for()
    assert "start=" not in page.evaluate("location.hash")
    page.get_by_label("turn", exact=True).fill("2")
    page.get_by_label("turn", exact=True).press("Enter")
    page.locator(".tokendetail", has_text="turn 2").wait_for()
    assert [text for text in _texts(watched, ".mark") if text.startswith("weights")][-1] == "weights 8"


def test_the_tree_stands_beside_the_conversation(stand: Stand, watch: Watch) -> None:
    talk = stand.talk(history="tree")
    talk.say("One", sim=NOW)
    first = list(talk.messages)
    talk.say("Go on", sim={**NOW, "text": "Here it is"})
    talk.messages = list(first)
    talk.say("Go on", sim={**NOW, "text": "Here is none"})
    talk.messages = [user("So far"), talk.messages[-1]]
    talk.say("A new beginning", sim=NOW)
    watched = watch(stand.server.base_url)
    page = watched.open(_at(talk))
    branches = page.locator(".branches > li")
    branches.nth(2).wait_for()
    told = [" ".join(text.split()) for text in branches.all_inner_texts()]
    assert "its row trains turns 1–2" in told[0]
    assert "after turn 1 of branch 0" in told[1]
    assert "retry" in told[1]
    assert "its row trains turns 3" in told[1]
    assert "compaction" in told[2]
    assert branches.nth(2).get_attribute("aria-current") == "true"
    page.locator(".said", has_text="A new beginning").wait_for()
    page.get_by_role("button", name="turn 4, in the loss of branch 2, quotes turn 3").wait_for()

    page.get_by_role("button", name="branch 0", exact=True).click()
    page.locator(".said", has_text="Here it is").wait_for()
    assert page.evaluate("location.hash") == _at(talk, branch=0)
    page.get_by_role("link", name="compare with branch 0").first.click()
    page.locator(".sidebyside .differs").wait_for()
    page.go_back()
    page.get_by_role("link", name="Tokens").click()
    page.locator(".tokens .tok").first.wait_for()
    assert page.evaluate("location.hash").startswith(f"{_at(talk)}/tokens?branch=0")


def test_a_stored_image_is_shown_in_its_own_size(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    talk.add({"role": "user", "content": [{"type": "image_url", "image_url": {"url": DOT}}]}, sim={"tool_calls": False})
    page = watch(stand.server.base_url).open(_at(talk))
    image = page.locator("img.stored")
    image.wait_for()
    image.evaluate("image => image.decode()")
    assert image.evaluate("image => [image.clientWidth, image.clientHeight]") == [1, 1]


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [0, 1, 2, 3, 4, 5, 6].map((place) => {
    const cell = document.createElement("span");
    cell.className = `tok lp${place}`;
    document.querySelector(".tokens").append(cell);
    const [one, other] = [getComputedStyle(cell).color, getComputedStyle(cell).backgroundColor].map(light).sort();
    return (other + 0.05) / (one + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_every_colour_can_be_read(page_stand: PageStand, watch: Watch, scheme: str) -> None:
    watched = watch(page_stand.stand.server.base_url, scheme=scheme)
    page = watched.open(f"#/session/{page_stand.filled.idle}/tokens")
    page.locator(".tokens .tok").first.wait_for()
    ratios = page.evaluate(CONTRAST)
    assert len(set(ratios)) == 7
    assert min(ratios) >= 4.5, ratios


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_barrier_that_axe_finds(page_stand: PageStand, watch: Watch, scheme: str) -> None:
    watched = watch(page_stand.stand.server.base_url, scheme=scheme)
    page = watched.open()
    filled = page_stand.filled
    found = []
    for place, ready in (
        (f"#/session/{filled.refused}", ".said"),
        (f"#/session/{filled.rolled_back}?seq=6", ".events .later"),
        (f"#/session/{filled.rolled_back}/tokens", ".tokens .tok"),
        (f"#/session/{filled.tree}?branch=1", ".branches li"),
        (f"#/rollouts?sessions={filled.tree}@1,{filled.tree}@2", ".sidebyside .text"),
    ):
        watched.go(place)
        page.wait_for_selector(ready)
        found += [f"{place}: {barrier}" for barrier in barriers(page, scheme)]
    assert not found, "\n".join(found)
