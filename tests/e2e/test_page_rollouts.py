"""Rollouts side by side in a real browser: aligned, sorted, compared, and read only as far as somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, Request, expect

from e2e.page import PageStand, Watched, barriers
from e2e.page_data import AT_ONCE, SIDE_BY_SIDE, rollouts

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

PLACE = f"#/group/{quote(SIDE_BY_SIDE, safe='')}/rollouts"
HEADS = ".gridcolumn"


@pytest.fixture(scope="module")
def ids(page_stand: PageStand) -> list[str]:
    return rollouts(page_stand.stand)


@pytest.fixture
def watched(watch: Watch, page_stand: PageStand, ids: list[str]) -> Watched:
    made: Watched = watch(page_stand.stand.server.base_url, width=2200, height=1000)
    return made


def read(watched: Watched, count: int) -> Page:
    """Once every rollout's head and the cells in sight have been read."""
    page = watched.page
    expect(page.locator(f"{HEADS} .reward")).to_have_count(count)
    expect(page.locator(".rolloutgrid >> text=Loading …")).to_have_count(0)
    return page


def names(page: Page) -> list[str]:
    return page.locator(f"{HEADS} strong a").all_inner_texts()


def test_a_groups_rollouts_are_columns(watched: Watched, page_stand: PageStand, ids: list[str]) -> None:
    watched.open(f"#/group/{quote(SIDE_BY_SIDE, safe='')}").click("text=Side by side")
    page = read(watched, len(ids))
    assert names(page) == ids
    first, last = page.locator(HEADS).first, page.locator(HEADS).last
    assert "the others are compared with this one" in first.inner_text()
    assert "differs from step 3 on" in last.inner_text()
    assert "resolved" in last.inner_text()
    assert page.locator(".gridcell .strip").count() > len(ids)
    assert page.locator(".gridcell:has-text('first difference')").count() == len(ids) - 1

    page.select_option("select[aria-label=Order]", "best")
    rewards = [page_stand.stand.http.get(f"/ui/api/sessions/{one}/rollout").json()["reward"] for one in ids]
    assert [rewards[ids.index(one)] for one in names(read(watched, len(ids)))] == sorted(rewards, reverse=True)
    assert "sort=best" in page.url
    page.click("text=First difference")
    page.reload()
    assert names(read(watched, len(ids)))[0] == ids[rewards.index(max(rewards))]


def test_branches_are_folded_and_one_can_be_chosen(watched: Watched) -> None:
    watched.open(PLACE)
    page = read(watched, 6)
    head = page.locator(f"{HEADS}:has-text('retail-03')")
    select = head.locator("select")
    assert "branches" in head.inner_text()
    turns = head.inner_text().split(" turns,")[0][-1]
    select.select_option("0")
    expect(head).not_to_contain_text(f"{turns} turns,")
    expect(select).to_have_value("0")


def test_two_are_shown_as_a_diff(watched: Watched, ids: list[str]) -> None:
    watched.open(PLACE)
    page = read(watched, len(ids))
    page.get_by_label(f"compare {ids[0]}").click()
    page.get_by_label(f"compare {ids[3]}").click()
    expect(page.locator(".difflist li").first).to_contain_text("Step 3")
    expect(page.locator(".difflist del").first).to_be_visible()
    expect(page.locator(".difflist ins").first).to_be_visible()
    expect(page.locator(".difflist")).to_contain_text("This rollout has ended.")
    page.reload()
    expect(page.locator(".difflist li").first).to_contain_text("Step 3")
    page.click("text=show them")
    expect(page.locator(".difflist li").first).to_contain_text("The messages of this step are equal.")
    page.click("text=Back to all")
    read(watched, len(ids))


def test_branches_differ_where_more_than_the_ids_of_calls_does(watch: Watch, page_stand: PageStand) -> None:
    talk = page_stand.stand.talk(history="tree")
    calls = {**AT_ONCE, "text": "I look.", "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    for result in ("sunny", "rain"):
        talk.messages = []
        (call,) = talk.say("One", sim=calls).json()["choices"][0]["message"]["tool_calls"]
        talk.add({"role": "tool", "tool_call_id": call["id"], "content": result}, sim=AT_ONCE)
    page = watch(page_stand.stand.server.base_url).open(f"#/session/{talk.id}?branch=0&tab=tree")
    page.get_by_role("link", name="compare with branch 0").click()
    expect(page.locator(".difflist li")).to_have_count(1)
    expect(page.locator(".difflist del").first).to_have_text("sunny")
    expect(page.locator(".difflist ins").first).to_have_text("rain")


def test_from_a_selection_in_the_list(watched: Watched, ids: list[str]) -> None:
    page = watched.open("#/?q=retail-")
    for one in ids[1:3]:
        page.get_by_label(f"pick {one}").check()
    page.click("text=2 side by side")
    assert sorted(names(read(watched, 2))) == ids[1:3]
    assert "sessions=" in page.url
    watched.go(f"#/rollouts?sessions={ids[4]}")
    assert names(read(watched, 1)) == [ids[4]]
    watched.expected = ("404 (Not Found)",)
    watched.go("#/rollouts?sessions=nobody")
    expect(page.locator(HEADS)).to_contain_text("session nobody does not exist")


def test_by_keyboard_and_without_a_barrier(watched: Watched, ids: list[str]) -> None:
    watched.open(PLACE)
    page = read(watched, len(ids))
    page.locator(".gridcell").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.at") == "1 1"
    page.keyboard.press("End")
    page.wait_for_function("document.activeElement.dataset.at === '7 1'")
    page.keyboard.press("Home")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        assert barriers(page, scheme) == []
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/ui#/session/{ids[1]}?turn=1")
    watched.go(f"{PLACE}?diff={ids[0]},{ids[1]}")
    page.wait_for_selector(".difflist pre")
    assert barriers(page, "light") == []


def test_only_what_is_in_sight_is_read_and_nothing_after_it_is_left(watch: Watch, page_stand: PageStand) -> None:
    """24 rollouts of 12 turns: a few cells in the document, a few requests, none after the view has been left."""
    stand = page_stand.stand
    for number in range(24):
        talk = stand.talk(session_id=f"many-{number:02}", group_id="many", attempt=number)
        for step in range(12):
            talk.say(str(step), sim={**AT_ONCE, "completion_tokens": 2})
    watched = watch(stand.server.base_url)
    asked: list[str] = []

    def keep(request: Request) -> None:
        if "/rollout?" in request.url and "start=" in request.url:
            asked.append(request.url)

    watched.page.on("request", keep)
    page = watched.open("#/group/many/rollouts")
    page.wait_for_selector(".gridcell .said")
    expect(page.locator("main [role=status]").first).to_contain_text("24 rollouts, 12 steps")
    assert page.locator(".gridcell").count() <= 40
    assert 0 < len(asked) <= 12
    page.locator(".rolloutgrid").evaluate("one => { one.scrollLeft = 1e6; one.scrollTop = 1e6 }")
    page.wait_for_selector(".gridcell[data-at='11 23'] .said")
    assert page.locator(".gridcell").count() <= 40
    assert len(asked) <= 30
    page.locator(".rolloutgrid").evaluate("one => { one.scrollLeft = 3000; one.scrollTop = 0 }")
    watched.go("#/groups")
    page.wait_for_selector("main tbody tr[data-key=many]")
    left = len(asked)
    page.wait_for_function("() => performance.getEntriesByType('resource').length > 0")
    assert len(asked) == left


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
