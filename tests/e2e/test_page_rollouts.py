"""Rollouts side by side in a real browser: what is common is folded, what differs is said and marked."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import pytest
from integration.stand import WEATHER
from playwright.sync_api import Page, expect

from e2e.page import PageStand, Watched, barriers
from e2e.page_data import AT_ONCE, SIDE_BY_SIDE, rollouts

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

PLACE = f"#/group/{quote(SIDE_BY_SIDE, safe='')}/rollouts"
HEADS = ".sidebyside thead th:not(:first-child)"
STEPS = ".sidebyside button[aria-expanded][data-step]"


@pytest.fixture(scope="module")
def ids(page_stand: PageStand) -> list[str]:
    return rollouts(page_stand.stand)


@pytest.fixture
def watched(watch: Watch, page_stand: PageStand, ids: list[str]) -> Watched:
    return watch(page_stand.stand.server.base_url, width=2200, height=1000)


def read(watched: Watched, count: int) -> Page:
    """Once every rollout and the texts in the document have been read."""
    page = watched.page
    expect(page.locator(f"{HEADS} .reward")).to_have_count(count)
    expect(page.locator(".sidebyside >> text=Loading …")).to_have_count(0)
    return page


def names(page: Page) -> list[str]:
    return page.locator(f"{HEADS} strong a").all_inner_texts()


def test_a_groups_rollouts_are_columns(watched: Watched, page_stand: PageStand, ids: list[str]) -> None:
    """In either order; the first differing step is unfolded, and each head says in words what differs."""
    watched.open(f"#/group/{quote(SIDE_BY_SIDE, safe='')}").click("text=Side by side")
    page = read(watched, len(ids))
    assert names(page) == [f"attempt {number}" for number in range(len(ids))]
    heads = page.locator(HEADS)
    expect(heads.nth(0)).to_contain_text("The others are compared with this one.")
    expect(heads.nth(1)).to_contain_text(
        "Step 3: attempt 1 gets “status delivered” where attempt 0 gets “status in transit”."
    )
    expect(heads.nth(1)).to_contain_text("resolved 0.85")
    assert page.locator("td.unequal").count() == len(ids) - 1
    expect(page.locator("tr.common")).to_have_text("Step 1 is the same in all. show")
    first = page.locator(".sidebyside tbody tr").nth(1)
    expect(first.locator("th button")).to_have_attribute("aria-expanded", "true")
    expect(first.locator("td").nth(1).locator("ins").last).to_have_text("delivered")

    page.select_option("select[name=order]", "best")
    rewards = [page_stand.stand.http.get(f"/ui/api/sessions/{one}/rollout").json()["reward"] for one in ids]
    shown = [rewards[int(name.removeprefix("attempt "))] for name in names(read(watched, len(ids)))]
    assert shown == sorted(rewards, reverse=True)
    assert "sort=best" in page.url
    page.click("text=First difference")
    page.reload()
    assert names(read(watched, len(ids)))[0] == f"attempt {rewards.index(max(rewards))}"
    head = page.locator(HEADS, has=page.get_by_label("branch of retail-03"))
    turns = head.inner_text().split(" turns,")[0][-1]
    head.locator("select").select_option("0")
    expect(head).not_to_contain_text(f"{turns} turns,")
    expect(head.locator("select")).to_have_value("0")


def test_what_two_agents_do_otherwise_is_said(watched: Watched, page_stand: PageStand) -> None:
    """A call beside an answer, an end, the same first line; branches too differ where more than ids of calls does."""
    stand = page_stand.stand
    call = {**AT_ONCE, "text": "I look.", "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    replies = [{**AT_ONCE, "text": "It is sunny."}, call, {**AT_ONCE, "text": "It is sunny.\nAnd warm."}]
    talks = [stand.talk(group_id="words", attempt=number + 1) for number in range(4)]
    for talk, reply in zip(talks, [*replies, None], strict=True):
        talk.say("Hello", tools=[WEATHER], sim={**AT_ONCE, "text": "Hello."})
        if reply:
            talk.say("Weather?", tools=[WEATHER], sim=reply)
    page = watched.open("#/group/words/rollouts")
    read(watched, 4)
    expect(page.locator(".differs")).to_have_text(
        [
            "Step 2: attempt 2 calls `get_weather: Bonn` where attempt 1 answers “It is sunny.”.",
            "Step 2: attempt 3 answers “It is sunny. …” where attempt 1 answers “It is sunny.”.",
            "Step 2: attempt 4 has ended where attempt 1 answers “It is sunny.”.",
        ]
    )
    tree = stand.talk(history="tree")
    for result in ("sunny", "rain"):
        tree.messages = []
        (called,) = tree.say("One", sim=call).json()["choices"][0]["message"]["tool_calls"]
        tree.add({"role": "tool", "tool_call_id": called["id"], "content": result}, sim=AT_ONCE)
    watched.go(f"#/session/{tree.id}?branch=1&tab=tree")
    page.locator(".tree-tab > p .treetitle", has_text="One").wait_for()
    page.get_by_role("link", name="compare with branch 0").click()
    read(watched, 2)
    expect(page.locator(".differs")).to_have_text("Step 2: branch 1 gets “rain” where branch 0 gets “sunny”.")


def test_from_a_selection_in_the_list(watched: Watched, ids: list[str]) -> None:
    page = watched.open("#/?q=retail-")
    for one in ids[1:3]:
        page.get_by_label(f"pick {one}").check()
    page.click("text=2 side by side")
    assert sorted(names(read(watched, 2))) == ["attempt 1", "attempt 2"]
    assert "sessions=" in page.url
    watched.go(f"#/rollouts?sessions={ids[4]}")
    assert names(read(watched, 1)) == ["attempt 4"]
    watched.expected = ("404 (Not Found)",)
    watched.go("#/rollouts?sessions=nobody")
    expect(page.locator(HEADS)).to_contain_text("session nobody does not exist")


def test_by_keyboard_and_without_a_barrier(watched: Watched, ids: list[str]) -> None:
    watched.open(PLACE)
    page = read(watched, len(ids))
    page.locator(STEPS).nth(2).focus()
    page.keyboard.press("Enter")
    expect(page.locator(STEPS).nth(2)).to_have_attribute("aria-expanded", "true")
    expect(page.locator(STEPS).nth(2)).to_be_focused()
    page.locator(STEPS).first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(STEPS).first).to_be_focused()
    expect(page.locator(STEPS).first).to_have_attribute("aria-expanded", "true")
    read(watched, len(ids))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        assert barriers(page, scheme) == []
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/ui#/session/{ids[0]}?turn=1*")


def test_a_large_group_has_pages_and_a_long_rollout_parts(watch: Watch, page_stand: PageStand) -> None:
    stand = page_stand.stand
    for number in range(14):
        talk = stand.talk(session_id=f"many-{number:02}", group_id="many", attempt=number)
        for step in range(105 if number == 13 else 2):
            talk.say(str(step), sim={**AT_ONCE, "completion_tokens": 2})
    watched = watch(stand.server.base_url)
    page = watched.open("#/group/many/rollouts")
    read(watched, 12)
    page.get_by_role("button", name="next").click()
    read(watched, 2)
    assert names(page) == ["attempt 12", "attempt 13"]
    assert "from=12" in page.url
    expect(page.locator(STEPS)).to_have_count(100)
    page.get_by_role("button", name="5 more steps").click()
    expect(page.locator(STEPS)).to_have_count(105)


def test_the_difference_of_two_texts(watched: Watched) -> None:
    page = watched.open("#/exports")
    cases = [["", ""], ["a b c", "a x c"], ["same", "same"], ["", "new"], ["x " * 3000, "y " * 3000], ["é 1", "é 2"]]
    found = page.evaluate(
        """async (cases) => {
            const { difference } = await import("/ui/static/diff.js");
            return cases.map(([one, other]) => difference(one, other));
        }""",
        cases,
    )
    for (one, other), parts in zip(cases, found, strict=True):
        assert "".join(part["text"] for part in parts if part["kind"] != "added") == one
        assert "".join(part["text"] for part in parts if part["kind"] != "removed") == other
    assert [part["kind"] for part in found[1]] == ["same", "removed", "added", "same"]
