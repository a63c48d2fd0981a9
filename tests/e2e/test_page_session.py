"""A session's view in a real Chromium: what its agent did, its log, tokens and tree, now and as they were."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from integration.stand import CHAT, WEATHER, Stand, Talk, engine_requests, until, user
from playwright.sync_api import expect

from e2e.page import PageStand, Watch, Watched, copied, nodes
from e2e.page_data import AT_ONCE as NOW

pytestmark = pytest.mark.long

TURNS = 160
"""Of a long session: more than fit in the window, and more events than the log shows at once."""

HIT = "[...(CSS.highlights.get('hit') ?? [])].map((one) => one.toString().toLowerCase()).join()"
ROLES = "all => all.map((one) => one.dataset.role)"
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


@pytest.fixture(scope="module")
def stand(page_stand: PageStand) -> Stand:
    return page_stand.stand


def _at(talk: Talk, **query: Any) -> str:
    return f"#/session/{quote(talk.id)}" + (
        "?" + "&".join(f"{key}={value}" for key, value in query.items()) if query else ""
    )


def _acts(watched: Watched) -> list[list[str]]:
    """The rows of the list, each as its lines."""
    rows = watched.page.locator(".act a").all_inner_texts()
    return [[line.strip() for line in row.split("\n") if line.strip()] for row in rows]


def _calls(command: str) -> dict[str, Any]:
    return {**NOW, "calls": [{"name": "bash", "arguments": {"command": command}}]}


LOG = "\n".join(f"collected {number}" for number in range(400))
RESULTS = (
    "3 files\nREADME",
    f"Traceback (most recent call last):\n{LOG}\n  boom\nValueError: no",
    '{"output": "fine\\nmore"}',
)


@pytest.fixture(scope="module")
def agent(stand: Stand) -> Talk:
    """An agent that calls a tool three times, once in vain, and then says what it did."""
    talk = stand.talk(group_id="swe/7", attempt=2, limits={"turns": 9}, metadata={"task": "swe-7"})
    talk.say("Mend the bug.\nNow.", tools=[WEATHER], sim=_calls("ls -la"))
    for result, command in zip(RESULTS, ("pytest -q", "cat > a <<E\nx\nE", ""), strict=True):
        given = [{"role": "tool", "tool_call_id": talk.messages[-1]["tool_calls"][0]["id"], "content": result}]
        sim = (
            _calls(command) if command else {**NOW, "tool_calls": False, "text": "**Done**, see `a`:\n\n```\ncode\n```"}
        )
        talk.add(*given, tools=[WEATHER], sim=sim)
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 0.5, "components": {"a": 1}}).status_code == 200
    return talk


def test_what_the_agent_did_is_seen_at_once(stand: Stand, agent: Talk, watch: Watch) -> None:
    watched = watch(stand.server.base_url, width=1440, height=900)
    page = watched.open(_at(agent))
    expect(page.locator(".act.turn").first).to_be_in_viewport()
    until(lambda: _acts(watched)[:1] == [["user Mend the bug. …"]] and len(_acts(watched)[3]) > 2)
    rows = _acts(watched)
    assert [row[0] for row in rows[1:]] == ["1", "2", "3", "4"]
    assert [row[1] for row in rows[1:]] == [
        "bash ls -la",
        "bash pytest -q",
        "bash cat > a <<E …",
        "**Done**, see `a`: …",
    ]
    assert "error Traceback (most recent call last): …" in " ".join(rows[2])
    assert [rows[1][2], rows[3][2]] == ["→ 3 files …", "→ fine …"]
    expect(page.locator(".act .wf i")).to_have_class(["gen", "env"] * 3 + ["gen"])
    for text in ("idle", "swe/7 attempt 2", "4 turns", "generating", "environment", "tokens"):
        expect(page.locator(".sessionhead")).to_contain_text(text)
    assert page.locator(".sessionhead").evaluate("one => one.clientHeight") < 60
    steps = page.locator(".step")
    expect(steps).to_have_count(4)
    # A turn's new input, its reply, and under each call what it came to.
    expect(steps.nth(0).locator(".said")).to_have_count(3)
    assert steps.nth(0).locator(".said").evaluate_all(ROLES) == ["user", "assistant", "tool"]
    expect(steps.nth(0).locator(".said .said")).to_contain_text("3 files")
    expect(steps.nth(3).locator(".said")).to_have_count(1)

    page.keyboard.press("e")
    expect(steps.nth(1).get_by_text("ValueError: no"), "why it failed stands at the end").to_be_in_viewport()
    assert page.evaluate("location.hash") == _at(agent, turn=2)
    expect(steps.nth(1).locator(".said .said .badge")).to_have_text("error")
    page.keyboard.press("j")
    expect(page.locator(".act a[aria-current]")).to_be_focused()
    expect(steps.nth(2).locator(".said[data-role=tool]")).to_contain_text('"output": "fine\\nmore"')
    page.keyboard.press("End")
    expect(page.locator(".act a[aria-current] .n")).to_have_text("4")
    page.locator(".promptfold summary").last.click()
    expect(page.locator(".prompt .said")).to_have_count(7)
    expect(page.locator(".prompt .stages")).to_contain_text(re.compile("gate .* engine .* total .* Sent as"))
    page.get_by_role("button", name="Copy request to the engine").wait_for()
    assert copied(page, "Copy link", steps.nth(1)) == f"{stand.server.base_url}/ui{_at(agent, turn=2)}"

    page.keyboard.press("/")
    page.keyboard.type("BOOM")
    expect(page.locator(".act")).to_have_count(1)
    # The result stands under the call that it answers.
    until(lambda: page.evaluate(HIT) == "boom")
    assert page.evaluate("location.hash") == _at(agent, turn=2)
    page.keyboard.press("Escape")
    expect(page.get_by_label("Search this session"), "the list is still that of this text").to_have_value("BOOM")
    page.keyboard.press("t")
    expect(page.locator(".tabs [aria-current]")).to_have_text("Tokens")
    page.locator(".sessiondetails > summary").click()
    expect(page.locator(".sessiondetails")).to_contain_text("4 of 9 turns, 5 left per rollout")
    expect(page.locator(".verdict", has_text="reward")).to_have_text("reward 0.500 a 1.000")


def test_an_agent_hangs_at_the_call_that_spawned_it(stand: Stand, watch: Watch) -> None:
    """Of two that were spawned at once; folded until a link leads into it. A compaction is named."""
    talk = stand.talk(history="tree")
    asked = ("Find the surveys.", "Look at the heat.")
    calls = [{"name": "spawn", "arguments": {"kind": "agent", "task": task}} for task in asked]
    talk.say("Which reefs recovered?", sim={**NOW, "calls": calls}, tools=[WEATHER])
    lead = talk.messages
    for name, task in zip(("surveys", "heat"), asked, strict=True):
        talk.messages = [{"role": "system", "content": "You are an agent."}]
        for text in (task, "And?"):
            talk.say(text, sim={**NOW, "text": f"{name} says so"}, headers={"x-turnlog-agent-id": name})
    results = [{"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in lead[-1]["tool_calls"]]
    talk.messages = [*lead]
    talk.add(*reversed(results), user("And you?"), sim={**NOW, "text": "I say so"})
    talk.messages = [user("In short"), talk.messages[-1]]
    talk.say("Write it.", sim=NOW)
    page = watch(stand.server.base_url).open(_at(talk))
    first = page.locator(".flow > .step > .flow > .said").nth(1)
    kinds = ":scope > :is(.toolcall, .agent, .said)"
    expect(first.locator(kinds)).to_have_count(6)
    for at, (name, task) in enumerate(zip(("surveys", "heat"), asked, strict=True)):
        call, agent, result = (first.locator(kinds).nth(3 * at + place) for place in range(3))
        expect(call).to_contain_text(task)
        expect(agent).to_contain_text(f"agent {name} · 2 turns · {name} says so")
        expect(result.locator(".text")).to_have_text(results[at]["content"])
    expect(page.locator(".act code.note")).to_have_text(["surveys", "surveys", "heat", "heat"])
    expect(page.locator(".agent[open]")).to_have_count(0)
    expect(page.locator(".transcript > .flow > .step")).to_have_count(3)
    expect(page.locator(".step[data-turn='6'] .said").first).to_contain_text("And you?")
    page.locator(".act a", has_text="heat says so").last.click()
    expect(page.locator(".agent[open] [data-turn='5'] h2")).to_be_in_viewport()
    expect(page.locator(".agent[open] [data-turn='5'] > .panelhead")).to_contain_text("agent heat")
    page.locator(".step[data-turn='7'] .cut", has_text="Compaction").wait_for()


ODD_IDS = {
    "of an agent that went on from there first": (["a", "b"], ["a", "b"], True),
    "two calls with one id": (["a", "a"], ["a", "a"], False),
    "the same call twice, and of no call": (["a", "b"], ["c", "a", "a"], False),
}


@pytest.mark.parametrize(("given", "answered", "has_agent"), ODD_IDS.values(), ids=ODD_IDS)
def test_results_stand_under_the_call_that_they_answer(
    stand: Stand, watch: Watch, given: list[str], answered: list[str], has_agent: bool
) -> None:
    def results(whose: str) -> list[dict[str, Any]]:
        pairs = enumerate(answered)
        return [{"role": "tool", "tool_call_id": one, "content": f"{whose} {at} of {one}"} for at, one in pairs]

    talk = stand.talk(history="tree")
    calls = [{"name": "bash", "arguments": {"command": name}} for name in ("one", "two")]
    headers = {"x-turnlog-agent-id": "lead"}
    talk.say("Go", sim={**NOW, "calls": calls, "call_ids": given}, tools=[WEATHER], headers=headers)
    lead = talk.messages
    if has_agent:
        talk.add(*results("sub"), user("Help"), sim=NOW, headers={"x-turnlog-agent-id": "sub"})
    talk.messages = lead
    talk.add(*results("lead"), sim={**NOW, "text": "Done."}, headers=headers)
    page = watch(stand.server.base_url).open(_at(talk))
    expect(page.locator(".flow > .step").last).to_contain_text("Done.")
    first = page.locator(".flow > .step > .flow > .said").nth(1)
    under = first.locator(":scope > :is(.toolcall, .said)")
    shown = {name: [] for name in ("one", "two")}
    until(lambda: under.count() == 2 + len([one for one in answered if one in given]))
    for text in under.all_inner_texts():
        if "command" in text:
            at = text.split()[-1]
        else:
            shown[at].append(text.split("lead ")[1])
    stray = page.locator(".flow > .step").last.locator(".said[data-role=tool]")
    wanted = {"one": ["0 of a"], "two": ["1 of b" if has_agent else "1 of a"]}
    if "c" in answered:
        wanted = {"one": ["1 of a", "2 of a"], "two": []}
        expect(stray).to_contain_text("answers c")
    assert shown == wanted
    expect(stray).to_have_count(answered.count("c"))


def test_rollbacks_refusals_and_an_erasure_are_marked(page_stand: PageStand, watch: Watch) -> None:
    watched = watch(page_stand.stand.server.base_url, scheme="dark")
    page = watched.open(f"#/session/{page_stand.filled.rolled_back}?turn=2")
    page.get_by_text("rolled back by event").wait_for()
    expect(page.locator(".act.discarded .n")).to_have_text(["2"])
    expect(page.locator(".step.discarded .said").first).to_be_in_viewport()
    watched.go(f"#/session/{page_stand.filled.refused}")
    failed = page.locator(".act.failed")
    expect(failed).to_have_text([re.compile("rejected.*engine_error.*500"), re.compile("the body is not valid JSON")])
    page.locator(".act.failed a").nth(1).click()
    expect(page.locator(".step.failed a[download]", has_text="the reply's first")).to_be_in_viewport()
    limited = page_stand.stand.talk(limits={"turns": 1})
    limited.say("Go", sim=NOW)
    assert limited.chat([*limited.messages, user("On")]).status_code == 409
    watched.go(_at(limited))
    expect(page.locator(".step.refused")).to_contain_text("A request after turn 1: the limit on turns is reached.")
    expect(page.locator(".step .said"), "those of turn 1 alone").to_have_count(2)
    watched.go(f"#/session/{page_stand.filled.erased}?tab=events")
    expect(page.locator("h1 + .badge")).to_contain_text("erased")
    expect(page.locator(".events summary")).to_have_text(
        [re.compile(event) for event in ("SessionCreated", "SessionClosed", "SessionErased")]
    )


def test_time_travel(stand: Stand, watch: Watch) -> None:
    talk = stand.talk(metadata={"task": "travel"})
    for text in ("one", "two", "three"):
        talk.say(text, sim=NOW)
    watched = watch(stand.server.base_url)
    page = watched.open(_at(talk, seq=5, tab="tree"))
    page.get_by_text("as of event 5 of 8").wait_for()
    expect(page.locator(".tabs [aria-current]"), "there is no tree").to_have_text("Transcript")
    expect(page.locator(".step.open .said"), "its reply came later").to_have_text([re.compile("two")])
    expect(page.get_by_role("button", name="Judge")).to_have_count(0)
    page.get_by_role("link", name="live", exact=True).click()
    expect(page.locator(".step .said")).to_have_count(6)
    expect(page.locator(".step").get_by_role("button", name="Judge")).to_have_count(3)
    watched.go(_at(talk, seq=4, tab="events"))
    page.get_by_text("as of event 4 of 8").wait_for()
    expect(page.locator(".act.turn")).to_have_count(1)
    page.get_by_label("event, of this session's log").press("ArrowRight")
    page.locator(".act.open").wait_for()
    until(lambda: "seq=5" in page.evaluate("location.hash"))
    page.get_by_label("event number").fill("6")
    page.get_by_label("event number").press("Enter")
    expect(page.locator(".act.turn")).to_have_count(2)
    expect(page.locator(".events .here")).to_have_attribute("data-seq", "6")
    expect(page.locator(".events .later")).to_have_count(2)
    page.locator(".events a", has_text="2").first.click()
    expect(page.locator(".act.turn")).to_have_count(0)
    page.locator(".travel").get_by_role("button", name="live", exact=True).click()
    expect(page.locator(".act.turn")).to_have_count(3)
    assert "seq=" not in page.evaluate("location.hash")


def test_a_fork_leads_to_the_turn_that_it_began_after(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    for text in ("one", "two"):
        talk.say(text, sim=NOW)
    made = stand.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    watched = watch(stand.server.base_url)
    page = watched.open(_at(stand.known(made[0]["session_id"])))
    page.locator(".sessiondetails > summary").click()
    expect(page.locator(".sessionfacts div", has_text="Forked from")).to_contain_text(
        f"{talk.id} after turn 1 its turns are context"
    )
    page.locator(".sessionfacts a", has_text=talk.id).click()
    until(lambda: page.evaluate("location.hash").startswith(_at(talk, turn=1)))
    expect(page.locator(".act.turn")).to_have_count(2)


def test_a_turn_in_flight_shows_its_request(page_stand: PageStand, watch: Watch) -> None:
    watched = watch(page_stand.stand.server.base_url)
    watched.page.clock.install()
    page = watched.open(f"#/session/{page_stand.filled.in_turn[1]}")
    page.locator(".said", has_text="Read the whole repository.").wait_for()
    expect(page.locator(".sessionhead")).to_contain_text("in flight")
    for text in ("in flight", "is generated", f"at {page_stand.stand.sim.base_url}".rstrip("/")):
        expect(page.locator(".step.open .panelhead")).to_contain_text(text)
    before = page.locator(".step.open time").inner_text()
    page.clock.fast_forward(61_000)
    until(lambda: page.locator(".step.open time").inner_text() != before)


def test_the_log_is_followed_live(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    watched = watch(stand.server.base_url)
    page = watched.open(_at(talk))
    page.get_by_text("No turn is committed yet.").wait_for()
    talk.say("while you look", sim=NOW)
    page.locator(".act", has_text="while you look").wait_for()
    page.get_by_role("link", name="Events").click()
    page.locator(".events li", has_text="TurnCommitted").wait_for()
    talk.say("and now", sim=NOW)
    expect(page.locator(".events li", has_text="TurnCommitted")).to_have_count(2)
    page.locator(".events summary", has_text="SessionCreated").click()
    expect(page.locator(".events pre")).to_contain_text('"rollback_window": 3')


def test_a_long_session_is_read_where_it_is_looked_at(stand: Stand, watch: Watch) -> None:
    """The outline follows the scrolling and leads it, nothing jumps while turns above are read; what is new stands at
    the end, and is followed by who is there."""
    talk = stand.talk()
    quick = {**NOW, "completion_tokens": 200}
    for number in range(TURNS):
        talk.say(f"say {number}" + " and more" * 100, sim=quick)
    talk.add(user("x" * 3_000_000), sim=quick)
    watched = watch(stand.server.base_url)
    asked: list[str] = []
    watched.page.on("request", lambda one: asked.append(one.url) if "/turns?" in one.url else None)
    page = watched.open(_at(talk, turn=80))
    current, pane = page.locator(".act a[aria-current]"), page.locator(".tabcontent")
    expect(page.locator(".act.turn")).to_have_count(TURNS + 1)
    until(lambda: page.locator(".step[data-turn='80'] .said").count() == 2)
    expect(page.locator(".step[data-turn='80'] h2")).to_be_in_viewport()
    assert page.locator(".step .said").count() < 60
    assert all(60 < int(url.split("start=")[1].split("&")[0]) < 100 for url in asked)
    pane.hover()
    page.mouse.wheel(0, -4000)
    until(lambda: int(current.locator(".n").inner_text()) < 80)
    until(lambda: f"turn={current.locator('.n').inner_text()}" in page.evaluate("location.hash"))
    number = int(current.locator(".n").inner_text())
    seen = f".step[data-turn='{number}']"
    place = page.locator(seen).bounding_box()
    page.locator(f".step[data-turn='{number - 3}'] .said").first.wait_for(state="attached")
    assert page.locator(seen).bounding_box() == pytest.approx(place, abs=1)
    talk.say("elsewhere", sim=quick)
    expect(page.locator(".act.turn")).to_have_count(TURNS + 2)
    assert page.locator(seen).bounding_box() == pytest.approx(place, abs=1)

    pane.evaluate("one => { one.scrollTop = one.scrollHeight }")
    expect(current.locator(".n")).to_have_text(re.compile(str(TURNS)[:2]))
    page.keyboard.press("End")
    talk.say("at the end", sim=quick)
    expect(page.locator(".step .said", has_text="at the end")).to_be_in_viewport()
    expect(current.locator(".n")).to_have_text(str(TURNS + 3))

    page.keyboard.press("/")
    page.keyboard.type("say 1")
    until(lambda: page.evaluate(HIT) == "say 1")
    expect(current.locator(".n")).to_have_text("2")
    page.keyboard.press("Enter")
    expect(current.locator(".n")).to_have_text("11")
    until(lambda: "turn=11" in page.evaluate("location.hash"))
    page.keyboard.press("Shift+Enter")
    expect(current.locator(".n")).to_have_text("2")
    page.get_by_label("Search this session").fill("")
    watched.go(_at(talk, turn=TURNS + 1))
    page.get_by_text("The first part of 2.9 MiB.").wait_for()
    page.get_by_role("button", name="show all", exact=True).click()
    page.get_by_role("button", name="show 200000 more of 3000000 characters").wait_for()
    watched.go(_at(talk, tab="events", turn=1))
    kept = []
    for number in range(10):
        talk.say(f"later {number}", sim=quick)
        page.locator(".events li", has_text=f"TurnCommitted turn {TURNS + 4 + number} ").wait_for()
        if number == 4:
            kept.append(nodes(page))
    until(lambda: nodes(page) - kept[0] < 600)  # what was let go is not collected at once
    page.get_by_role("button", name=re.compile("show .* earlier of")).click()
    expect(page.locator(".events li").first).to_have_attribute("data-seq", "1")


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
    page = watched.open(_at(talk, turn=3))
    page.locator(".step[data-turn='3'] .said").first.wait_for()
    page.locator(".step[data-turn='3'] .promptfold > summary").click()
    page.locator(".prompt .said").first.wait_for()
    for details in page.locator("main details").all():
        details.evaluate("one => { one.open = true }")
    page.locator(".step[data-turn='3'] .textblock").get_by_role("button", name="show ").first.click()
    shown = page.locator("main").text_content() or ""  # innerText leaves out what is out of sight
    assert shown.count(HOSTILE) > 20
    assert MARKUP in shown
    assert LONG not in shown
    assert "… (5056 characters)" in shown
    assert SHOWN in shown
    assert "halfU+D800a1" in shown
    assert "x" * 200_000 in shown
    assert "http://192.0.2.7/beacon.png" in shown
    assert "image: image/svg+xml" in shown
    assert page.locator("main :is(img, script, iframe, object, embed, b, [onclick], [onerror])").count() == 0
    assert page.locator("main a:not([href^='#'])").count() == 0
    watched.go(_at(talk, tab="tokens", branch=0))
    page.mouse.move(0, 0)
    page.locator(".tokens .tok").first.focus()
    page.locator(".tokendetail", has_text="position ").wait_for()
    expect(page.locator(".tokens")).to_contain_text(f"weights {HOSTILE}")
    for place, ready in (
        (f"#/?q={talk.id}", "main tbody tr[data-key]"),
        ("#/groups", "main :text('<img')"),
        ("#/exports", "main form"),
        (f"#/group/{quote(HOSTILE + MARKUP, safe='')}?x={quote(HOSTILE)}", "main :text('<img')"),
        ("#/?engine=javascript:alert(1)", "main form"),
    ):
        watched.go(place)
        page.wait_for_selector(ready)
        assert page.locator("main :is(img, script, b), #fleet img").count() == 0
    kept = {"abort_all_requests": False}  # other tests' turns are in flight there
    stand.sim.post("/update_weight_version", json={"new_version": HOSTILE, **kept})
    talk.say("again", sim=NOW)
    assert stand.http.post(f"/adapters/{quote(HOSTILE)}/pause", json={}).status_code == 200
    try:
        page.wait_for_selector("#fleet .figure >> text=<img src=x")
        page.click(".engines summary")
        page.wait_for_selector(".engines td >> text=<img src=x")
        assert page.locator("#fleet img").count() == 0
    finally:
        stand.http.post(f"/adapters/{quote(HOSTILE)}/resume", json={})
        stand.sim.post("/update_weight_version", json={"new_version": "12", **kept})
        stand.talk().say("back to 12", sim=NOW)


def test_a_stored_image_is_shown_in_its_own_size(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    talk.add({"role": "user", "content": [{"type": "image_url", "image_url": {"url": DOT}}]}, sim={"tool_calls": False})
    page = watch(stand.server.base_url).open(_at(talk))
    image = page.locator("img.stored")
    image.wait_for()
    image.evaluate("image => image.decode()")
    assert image.evaluate("image => [image.clientWidth, image.clientHeight]") == [1, 1]


def test_the_copied_request_goes_to_the_engine_and_leaves_the_session_alone(
    page_stand: PageStand, watch: Watch, tmp_path: Path
) -> None:
    stand = page_stand.stand
    talk = stand.talk()
    touched = tmp_path / "touched"
    said = f"it's \u202e \u0000 \u001b[31m $(touch {touched}) `touch {touched}`\nTURNLOG\n"
    talk.say(said, sim={"latency_s": 0}, temperature=0.5)
    page = watch(stand.server.base_url).open(_at(talk))
    page.locator(".said").last.wait_for()
    before = talk.events()
    page.locator(".promptfold > summary").click()
    command = copied(page, "Copy request to the engine as curl")
    assert "\u202e" not in command
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(ran.stdout)["choices"][0]["message"]["role"] == "assistant"
    (sent,) = (one["body"] for one in stand.engine_requests(talk.id))
    again = engine_requests(stand.sim, CHAT, None)[-1]["body"]
    assert again["messages"] == sent["messages"]
    assert again["temperature"] == 0.5
    assert talk.events() == before
    assert not touched.exists()


@pytest.fixture(scope="module")
def tree(stand: Stand) -> Talk:
    """A retry of another agent's, a chain of 12 turns, and a summary of a discarded plan."""
    talk = stand.talk(history="tree")
    talk.say("Which reefs recovered?", sim=NOW)
    first = list(talk.messages)
    talk.say("Search the surveys.", sim={**NOW, "text": "Here it is"})
    quoted = talk.messages[-1]
    for number in range(12):
        talk.say(f"Step {number}", sim={**NOW, "completion_tokens": 3})
    talk.messages = list(first)
    talk.say("Ask the archive.", sim={**NOW, "text": "Here is none"}, headers={"x-turnlog-agent-id": "scout"})
    assert talk.chat([user("So far"), quoted, user("Write it")], sim=NOW).status_code == 200
    return talk


def test_tokens_are_folded_coloured_and_jumped_to(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    sim = {**NOW, "completion_tokens": 1200, "weight_versions": ["7", "8"]}
    talk.say("a long question " * 50, sim=sim, top_logprobs=3)
    talk.say("more", sim={**NOW, "completion_tokens": 1500, "finish_reason": "length"})
    count = talk.committed()[1]["output_tokens"]
    talk.column(2, "advantage", [number / count for number in range(count)])
    kept = list(talk.messages)
    talk.say("not this", sim={**NOW, "completion_tokens": 20})
    talk.messages = kept
    talk.say("but this", sim={**NOW, "completion_tokens": 30})
    [row] = talk.rows()
    sampled = [at for at, there in enumerate(row["sampled_mask"]) if there]
    least = sorted(sampled, key=lambda at: row["logprobs"][at])[:30]

    page = watch(stand.server.base_url).open(f"#/session/{talk.id}?tab=tokens")
    cells = page.locator(".tokens .tok")
    expect(cells).to_have_count(2000)
    expect(cells.first, "it opens at the first sampled token").to_have_attribute("data-at", str(sampled[0]))
    assert page.evaluate("document.querySelectorAll('*').length") < 4000
    expect(page.locator(".tokenhead").first).to_contain_text("set TURNLOG_PAGE_TOKENIZER to read them")
    legend = page.locator(".tokens-tab .legend")
    expect(legend).to_contain_text("perplexity")
    expect(legend).to_contain_text("rolled back")
    gone = talk.committed()[2]["output_tokens"]
    amounts = f"sampled {len(sampled) + gone:,} = {sum(row['loss_mask']):,} trained + {gone:,} rolled back"
    expect(page.locator(".tokenhead").first).to_contain_text(amounts)
    counts = legend.locator("strong").all_text_contents()
    assert sum(int(count.replace(",", "")) for count in counts) == len(sampled)

    page.keyboard.press("u")
    focused = "document.querySelector('.tok:focus')?.dataset.at"
    until(lambda: page.evaluate(focused) is not None)
    assert page.evaluate(focused) == str(min(least))
    page.locator(f".tok[data-at='{min(least)}']").hover()
    page.keyboard.press("U")
    until(lambda: page.evaluate(focused) == str(max(least)))
    assert f"at={max(least)}" in page.evaluate("location.hash")
    detail = page.locator(".tokendetail")
    expect(detail).to_contain_text(f"position {max(least):,} · id {row['tokens'][max(least)]}")
    expect(detail).to_contain_text(f"logprob {row['logprobs'][max(least)]:.6f}")
    page.locator(f".least [data-at='{least[0]}']").click()
    until(lambda: page.evaluate(focused) == str(least[0]))
    expect(page.locator(".least [aria-current]")).to_have_attribute("data-at", str(least[0]))

    page.get_by_label("place in the row").fill(str(sampled[-5]))
    until(lambda: page.evaluate(focused) == str(sampled[-5]))
    for note in (f"rolled back here: turn 3, {gone} tokens", "ends by length"):
        expect(page.locator(".turnrun", has_text=note)).not_to_have_count(0)
    page.get_by_label("colour", exact=True).select_option("column advantage")
    expect(page.locator(f".tok[data-at='{row['turns'][1]['end'] - 1}']")).to_contain_class("lp6")
    assert "0" not in legend.locator("strong").all_text_contents()
    page.get_by_label("colour", exact=True).select_option("entropy")
    page.get_by_role("button", name="earlier tokens").click()
    page.locator(f".tok[data-at='{sampled[0]}']").wait_for()
    prompt = page.get_by_role("button", name=f"prompt, {sampled[0]:,} tokens")
    prompt.click()
    expect(page.locator(".promptrun .tok")).to_have_count(sampled[0])
    page.locator(".promptrun .tok").last.focus()
    page.locator(".tokendetail", has_text="not sampled, not in the loss").wait_for()
    page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text("weights 7")
    expect(detail).to_contain_text("entropy")
    prompt.click()
    expect(page.locator(".promptrun")).to_have_count(0)


def test_a_branch_is_chosen_and_the_tree_is_a_graph(stand: Stand, tree: Talk, watch: Watch) -> None:
    watched = watch(stand.server.base_url)
    segments = stand.talk(on_divergence="segment", rollback_window=1)
    for text in ("one", "start again", "and again"):
        segments.messages = []
        segments.say(text, sim=NOW)
    page = watched.open(_at(segments, tab="tokens"))
    page.wait_for_selector(".tokens .tok")
    every = page.get_by_label("branch", exact=True).locator("option").all_inner_texts()
    assert [one.split(":")[0] for one in every] == ["0", "1", "2"], "also what has no row"
    page.get_by_label("branch", exact=True).select_option("1")
    page.wait_for_selector(".tokens .turnmark:has-text('turn 2')")

    page = watched.go(_at(tree, tab="tokens", branch=0))
    page.locator(".tokens .turnrun").nth(13).wait_for()
    page.get_by_label("branch", exact=True).select_option("1")
    until(lambda: "branch=1" in page.evaluate("location.hash"))
    every = sum(sum(row["loss_mask"]) for row in tree.rows())
    [row] = [row for row in tree.rows() if row["branch"] == 1]
    own, there = sum(row["loss_mask"]), sum(row["sampled_mask"])
    told = f"{own} trained + {there - own} in the loss of branch 0 + {every - there} in other rows"
    expect(page.locator(".tokenhead").first).to_contain_text(f"sampled {every} = {told}")
    first = page.locator(".tokens .tok").first
    expect(first).to_have_attribute("title", "masked: in the loss of branch 0")
    first.focus()
    expect(page.locator(".tokendetail")).to_contain_text("masked: in the loss of branch 0")
    expect(page.locator(".tokens-tab .legend")).to_contain_text("masked: in the loss of branch 0")
    page.locator(".turnrun .mark", has_text="turn 15").click()
    until(lambda: "turn=15" in page.evaluate("location.hash"))
    expect(page.locator(".turnrun")).to_have_count(2)

    watched.go(_at(tree, tab="tree", turn=15))
    graph = page.get_by_role("group", name="Tree: 3 branches, 16 turns")
    names = graph.locator(".branch > button")
    expect(names).to_have_text(
        ["0 start Which reefs recovered?", "1 agent scout: Ask the archive.", "2 compaction So far"]
    )
    told = page.locator(".tree-tab > p")
    expect(told).to_contain_text("branch 1, agent after turn 1 of branch 0, because another agent asked, agent scout")
    expect(told).to_contain_text("its row trains turns 15")
    expect(graph.get_by_role("button", name="turn 16, in the loss of branch 2, quotes turn 2")).to_have_count(1)
    x = "one => one.getBoundingClientRect().x"
    before, own = (graph.locator(f"[aria-label^='turn {turn},']").evaluate(x) for turn in (1, 15))
    assert before < own < before + 40, "a branch begins right of the turn that it left"

    chain = graph.get_by_role("button", name="turns 3 to 13, in the loss of branch 0: show")
    chain.focus()
    page.keyboard.press("Enter")
    expect(graph.get_by_role("button", name="turn 3, ")).to_be_focused()
    graph.locator("[aria-label^='turn 2,']").focus()
    page.keyboard.press(" ")
    until(lambda: "turn=2" in page.evaluate("location.hash"))
    graph.get_by_role("button", name="2 compaction").click()
    until(lambda: "branch=2" in page.evaluate("location.hash"))
    expect(told).to_contain_text(
        "branch 2, compaction, because its first request quotes a reply of another branch (turn 2)"
    )
