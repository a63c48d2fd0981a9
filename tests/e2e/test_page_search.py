"""Search, notes and tags of the page in a real browser."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest
from integration.stand import Stand, standing, until
from playwright.sync_api import expect

from e2e.page import PageStand, Watched, barriers, require_chromium
from e2e.page_data import AT_ONCE

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

ROWS = "main tbody tr[data-key]"
MARKUP = "😀 <b>zebra</b> crossing"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    require_chromium()
    with standing(tmp_path_factory.mktemp("search"), environment={"TURNLOG_FEATURES": "all"}) as stand:
        for number in range(25):
            talk = stand.talk(session_id=f"found-{number:02}", group_id="zoo", metadata={"task": f"t{number % 2}"})
            talk.say(
                MARKUP if number == 3 else f"an elephant, number {number}", sim={**AT_ONCE, "completion_tokens": 4}
            )
        until(lambda: stand.http.get("/search", params={"q": "elephant", "limit": 100}).json()["is_current"])
        yield stand


def test_hits_lead_to_their_turns(searched: Stand, watch: Watch) -> None:
    watched = watch(searched.server.base_url)
    page = watched.open("#/")
    page.keyboard.press("g")
    page.keyboard.press("f")
    expect(page.locator("input[name=q]")).to_be_focused()
    page.keyboard.type("zebra")
    hit = page.locator(".hits li")
    expect(hit).to_have_count(1)
    expect(hit.locator("mark")).to_have_text("zebra")
    assert MARKUP in hit.inner_text(), "text, not markup"
    assert "q=zebra" in page.url
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        assert barriers(page, scheme) == []
    hit.locator("a").first.click()
    page.wait_for_url("**/ui#/session/found-03?turn=1&brought=1")
    page.go_back()
    expect(page.locator("input[name=q]")).to_have_value("zebra")
    expect(page.locator("body")).not_to_be_focused()


def test_many_hits_are_paged_and_filtered(searched: Stand, watch: Watch) -> None:
    page = watch(searched.server.base_url).open("#/search?q=elephant&role=user")
    expect(page.locator(".hits li")).to_have_count(20)
    page.click("text=Load more")
    expect(page.locator(".hits li")).to_have_count(24)
    page.fill("input[name=metadata]", "task=t1")
    expect(page.locator(".hits li")).to_have_count(11)
    page.fill("input[name=q]", "nobodysaidthis")
    expect(page.locator("main [role=status]").first).to_contain_text("0 hits")


def test_without_an_index_it_says_how(page_stand: PageStand, watch: Watch) -> None:
    watched = watch(page_stand.stand.server.base_url)
    watched.expected = ("404 (Not Found)",)
    page = watched.open("#/search?q=anything")
    expect(page.locator("main .message")).to_contain_text("TURNLOG_FEATURES=all")


def test_notes_and_tags_are_shown_filtered_and_copied(searched: Stand, watch: Watch) -> None:
    searched.known("found-07").noted(note="looks like a loop", tags=["odd", "to check"])
    watched = watch(searched.server.base_url, width=1440)
    page = watched.open("#/?tag=odd")
    expect(page.locator(ROWS)).to_have_count(1)
    page.click("text=Columns")
    page.get_by_label("Note and tags").check()
    page.keyboard.press("Escape")
    expect(page.locator(ROWS)).to_contain_text("odd, to check, looks like a loop")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    watched.go("#/session/found-07")
    expect(page.locator(".sessiondetails > summary")).to_contain_text("looks like a loop")
    page.locator(".sessiondetails > summary").click()
    page.get_by_role("button", name="Copy note as curl").click()
    page.get_by_text("Copied").first.wait_for()
    command = page.evaluate("navigator.clipboard.readText()").replace("looks like", "was")
    subprocess.run(["bash", "-c", command], capture_output=True, timeout=30, check=True)
    expect(page.locator(".sessionfacts").first).to_contain_text("was a loop")
    page.locator(".sessionfacts a", has_text="to check").click()
    expect(page.locator(ROWS)).to_have_count(1)


def test_metadata_filters_the_list(searched: Stand, watch: Watch) -> None:
    page = watch(searched.server.base_url, width=1440).open("#/?q=found-0")
    expect(page.locator(ROWS)).to_have_count(10)
    page.fill("input[name=metadata]", "task")
    page.fill("input[name=metadata]", "task=t1")
    expect(page.locator(ROWS)).to_have_count(5)
    assert "metadata=task%3Dt1" in page.url
