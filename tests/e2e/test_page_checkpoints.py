"""The page's views of checkpoints in a real browser, while a checkpoint is made and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from integration.stand import Stand, standing
from playwright.sync_api import expect

from e2e.page import Watched, barriers, require_chromium
from e2e.page_data import AT_ONCE

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

ROWS = "main tbody tr[data-key]"
SESSIONS = 250
"""More than a page of a checkpoint's sessions."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    require_chromium()
    with standing(tmp_path_factory.mktemp("checkpoints")) as stand:
        for number in range(1, SESSIONS):
            stand.talk(session_id=f"kept-{number:03}")
        yield stand


def test_checkpoints_are_made_read_and_restored(kept: Stand, watch: Watch) -> None:
    """By keyboard; the lists follow what holds all turns, and the sessions lead to what they were."""
    watched = watch(kept.server.base_url)
    page = watched.open("#/")
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page.locator("main .message")).to_contain_text("There are no checkpoints.")
    talk = kept.talk(session_id="kept-0", group_id="kept")
    talk.say("before", sim=AT_ONCE)
    seq = len(talk.types())
    assert kept.http.post("/checkpoints", json={"name": "step-40", "cut": "drain"}).status_code == 200
    row = page.locator(f"{ROWS}[data-key='step-40']")
    expect(row.locator("td").nth(1)).to_have_text(str(SESSIONS))
    talk.say("after", sim=AT_ONCE)
    kept.talk(session_id="later-1")

    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui#/checkpoint/step-40")
    expect(page.locator("nav a[aria-current]")).to_have_text("Checkpoints")
    then = page.locator(f"{ROWS}[data-key='kept-0'] td")
    expect(then.nth(0)).to_have_text(str(seq))
    expect(then.nth(1)).to_have_text("2 events")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        assert barriers(page, scheme) == []
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the restore's command").click()
    page.get_by_text("Copied").first.wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == f"turnlog checkpoint restore step-40 --url {kept.server.base_url}"

    assert kept.http.post("/checkpoints/step-40/restore").status_code == 200
    expect(then.nth(1)).to_have_text("3 events")
    watched.go("#/checkpoints")
    expect(page.locator(ROWS)).to_have_count(2)
    before = page.locator(ROWS).first
    expect(before).to_contain_text("step-40")
    expect(before.locator("td").nth(4)).to_have_text("restore")

    watched.go("#/checkpoint/step-40")
    page.locator(f"{ROWS}[data-key='kept-0'] a").first.click()
    page.wait_for_url(f"**/ui#/session/kept-0?seq={seq}")
    page.locator(".sessiondetails > summary").click()
    facts = page.locator(".sessionfacts div", has_text="In checkpoints")
    expect(facts).to_contain_text(f"step-40 at event {seq}")
    facts.get_by_role("link", name=f"event {seq + 2}").click()
    page.locator(".act", has_text="after").wait_for()


def test_a_long_checkpoint_is_paged(kept: Stand, watch: Watch) -> None:
    assert kept.http.post("/checkpoints", json={"name": "long"}).status_code == 200
    page = watch(kept.server.base_url).open("#/checkpoint/long")
    expect(page.locator(ROWS).first).to_be_visible()
    page.locator("main .table-scroll").evaluate("one => { one.scrollTop = one.scrollHeight }")
    expect(page.locator("main .foot")).to_have_text("All shown")
    page.locator("main .table-scroll").evaluate("one => { one.scrollTop = one.scrollHeight }")
    expect(page.locator(f"{ROWS}[data-key='kept-{SESSIONS - 1}']")).to_be_visible()
    assert kept.http.delete("/checkpoints/long").status_code == 204
