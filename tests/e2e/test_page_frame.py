"""Signing in, notes, a lost connection, long lists, checkpoints: on a server with a token."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from fault.locks import file_locked
from integration.stand import TIMEOUT_S, Stand, standing, until
from playwright.sync_api import Page, expect

from e2e.page import ROWS, Watch, Watched, barriers, copied, require_chromium
from e2e.page_data import AT_ONCE

pytestmark = pytest.mark.long

TOKEN = "an-admin-token-of-the-page-tests"
MANY = 450
"""More than two pages of the list."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    require_chromium()
    with standing(tmp_path_factory.mktemp("guarded"), environment={"TURNLOG_ADMIN_TOKEN": TOKEN}) as stand:
        stand.http.close()
        stand.http = httpx.Client(
            base_url=stand.server.base_url, timeout=TIMEOUT_S, headers={"authorization": f"Bearer {TOKEN}"}
        )
        with ThreadPoolExecutor(16) as threads:
            made = threads.map(lambda number: stand.talk(session_id=f"many-{number:04}"), range(MANY))
            assert len(list(made)) == MANY
        yield stand


@pytest.fixture
def watched(guarded: Stand, watch: Watch) -> Watched:
    """The server first: its database is migrated by `asyncio.run`, which cannot be once Playwright's loop runs."""
    made = watch(guarded.server.base_url)
    made.expected = ("401 (Unauthorized)",)
    return made


def signed_in(watched: Watched, place: str = "#/") -> Page:
    page = watched.page
    page.goto(f"{watched.base_url}/ui{place}")
    page.fill("#token", TOKEN)
    page.click("button.primary")
    page.wait_for_selector("#connection[data-state=live]")
    return page


def scrolled_to(page: Page, what: str) -> Callable[[], bool]:
    """Is it there at the end of the list, which grows when more of it has come?"""

    def is_shown() -> bool:
        page.locator("main .table-scroll").evaluate("element => { element.scrollTop = element.scrollHeight }")
        return page.locator(what).count() == 1

    return is_shown


def test_sign_in_and_out(watched: Watched) -> None:
    watched.expected = ("401 (Unauthorized)", "404 (Not Found)")
    page = watched.page
    page.goto(f"{watched.base_url}/ui#/groups")
    page.fill("#token", "not the token")
    page.click("button.primary")
    page.wait_for_selector("text=The server does not know this token.")
    assert not page.context.cookies()
    page.fill("#token", TOKEN)
    page.click("button.primary")
    page.wait_for_selector("text=There are no groups yet")
    assert page.evaluate("document.cookie") == ""
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")

    command = copied(page, "Copy as curl")
    assert '-H "Authorization: Bearer $TURNLOG_ADMIN_TOKEN"' in command
    assert TOKEN not in command
    environment = {**os.environ, "TURNLOG_ADMIN_TOKEN": TOKEN}
    ran = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, check=True, timeout=30)
    assert json.loads(ran.stdout)["groups"] == []
    assert TOKEN not in page.content()
    watched.go("#/search?q=anything")
    expect(page.locator("main .message"), "there is no index").to_contain_text("TURNLOG_FEATURES=all")

    page.click("#sign-out")
    page.wait_for_selector("#token")
    assert not page.context.cookies()
    page.reload()
    page.wait_for_selector("#token")


def test_the_token_of_a_run_shows_that_run_alone(watched: Watched, guarded: Stand) -> None:
    watched.expected = ("401 (Unauthorized)", "404 (Not Found)")
    own = guarded.talk(session_id="of-a-team", run="team", group_id="g")
    token = guarded.http.post("/runs/team/token").json()["token"]
    page = watched.page
    page.goto(f"{watched.base_url}/ui")
    page.fill("#token", token)
    page.click("button.primary")
    page.wait_for_url("**/ui#/runs?run=team")
    expect(page.locator("main h1")).to_have_text("team")
    expect(page.locator("#run")).to_have_text("Run team")
    page.get_by_role("navigation").get_by_role("link", name="Sessions").click()
    expect(page.locator(ROWS)).to_have_count(1)
    watched.go("#/?run=default")
    page.wait_for_url("**/ui#/?run=team")
    own.say("Hello", sim=AT_ONCE)
    expect(page.locator(f"{ROWS} td", has_text="Hello").first).to_be_visible()
    for place in ("groups", "versions", "search?q=x", "exports", "session/of-a-team"):
        watched.go(f"#/{place}")
        expect(page.locator("main h1")).to_be_attached()
    expect(page.locator(".said").first).to_be_visible()
    watched.go("#/session/many-0001")
    expect(page.locator("main .message")).to_contain_text("There is no session")
    assert guarded.http.delete("/runs/team/token").status_code == 204
    until(lambda: page.reload() is not None and page.locator("#token").count() == 1)


def test_a_note_is_written_on_the_page(watched: Watched, guarded: Stand) -> None:
    """By keyboard, in a session that is closed. What differs alone is written: a tag with a comma stays, and so do line
    ends that a browser writes otherwise."""
    watched.expected = ("401 (Unauthorized)", "400 (Bad Request)")
    talk = guarded.talk(session_id="noted-1")
    assert guarded.http.delete(talk.path).status_code == 204
    page = signed_in(watched, f"#/session/{talk.id}")
    page.locator(".sessiondetails > summary").click()
    page.get_by_role("button", name="Edit note").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("It loops <b>here</b>.")
    page.keyboard.press("Tab")
    page.keyboard.type("loop, look at")
    assert barriers(page) == []
    page.keyboard.press("Control+Enter")
    expect(page.locator(".sessiondetails .sessionfacts >> text=It loops <b>here</b>.")).to_be_visible()
    expect(page.locator("form.noteform")).to_be_hidden()
    expect(page.get_by_role("button", name="Edit note")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.input_value("textarea[name=note]") == "It loops <b>here</b>."
    tags = page.locator("input[name=tags]")
    tags.fill("loop, " + "x" * 129)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".noteform [role=alert]")).to_contain_text("tags")
    tags.fill("")
    page.keyboard.press("Enter")
    expect(page.locator(".sessionfacts dt:has-text('Tags')")).to_have_count(0)

    others = [" spaced", '"quoted", too', "a, b", "plain"]
    talk.noted(note="one\r\ntwo\n", tags=others)
    page.reload()
    page.locator(".sessiondetails").evaluate("one => { one.open = true }")
    page.get_by_role("button", name="Edit note").click()
    tags.fill(f'{tags.input_value()}, "new, too", newer')
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("form.noteform")).to_be_hidden()
    written = [(one["name"], one.get("value")) for one in talk.events() if one["type"] == "AnnotationWritten"]
    first = [("note", "It loops <b>here</b>."), ("tags", ["look at", "loop"]), ("tags", None)]
    assert (written[:3], written[5:]) == (first, [("tags", sorted([*others, "new, too", "newer"]))])


PUT = """([address, headers]) =>
    fetch(address, { method: "PUT", credentials: "include", headers, body: '{"value": "written"}' })
        .then((response) => String(response.status), (error) => error.name)"""


def test_no_other_origin_writes_a_note(watched: Watched, guarded: Stand, tmp_path: Path) -> None:
    """A page on another port of the same host: the browser sends it the cookie, and asks before it sends a PUT."""
    talk = guarded.talk(session_id="noted-2")
    own = signed_in(watched)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        thread = Thread(target=other.serve_forever)
        thread.start()
        try:
            page = own.context.new_page()
            page.goto(f"http://127.0.0.1:{other.server_port}/")
            address = f"{watched.base_url}{talk.path}/annotations/note"
            for headers in ({}, {"x-turnlog-page": "1"}):
                assert page.evaluate(PUT, [address, headers]) == "TypeError"
            page.close()
        finally:
            other.shutdown()
            thread.join()
    note = {"x-turnlog-page": "1", "content-type": "application/json"}
    assert own.evaluate(PUT, [address, note]) == "200", "the page itself may"
    assert [one["value"] for one in talk.events() if one["type"] == "AnnotationWritten"] == ["written"]


def test_a_long_list_keeps_the_document_small(watched: Watched, guarded: Stand) -> None:
    """What changes on a later page is not new."""
    page = signed_in(watched, "#/?q=many-&sort=created_at&order=asc")
    expect(page.locator("main [role=status]").first).to_have_text(f"{MANY} sessions")
    until(scrolled_to(page, f"text=All {MANY} shown"))
    listed = guarded.get("/ui/api/sessions", q="many-", sort="created_at", order="asc", limit=500)["sessions"]
    first, last = (listed[at]["session_id"] for at in (0, -1))
    until(scrolled_to(page, f"{ROWS}[data-key={last}][aria-rowindex='{MANY + 1}']"))
    assert page.locator(ROWS).count() < 80
    page.locator(f"{ROWS}[data-key={last}] th a").focus()
    page.keyboard.press("Home")
    page.wait_for_selector(f"{ROWS}[data-key={first}][aria-current]")

    page.reload()
    top = page.locator(ROWS).first
    expect(top).to_have_attribute("data-key", first)
    for session_id in (last, first):
        assert guarded.http.put(f"/sessions/{session_id}/reward", json={"reward": 0.5}).status_code == 200
    expect(top.locator("td").nth(9)).to_have_text("0.500")
    expect(page.locator("button.changed")).to_be_hidden()
    watched.go("#/?q=many-")
    expect(top).to_have_attribute("data-key", first)
    assert guarded.http.put(f"/sessions/{last}/reward", json={"reward": 1}).status_code == 200
    expect(top).to_have_attribute("data-key", last)
    expect(page.locator("main .bar [role=status]")).to_have_text(f"{MANY} sessions")


def test_checkpoints_are_made_read_and_restored(watched: Watched, guarded: Stand) -> None:
    """By keyboard; the lists follow what holds all turns, and the sessions lead to what they were."""
    page = signed_in(watched)
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page.locator("main .message")).to_contain_text("There are no checkpoints.")
    talk = guarded.talk(session_id="kept-0")
    talk.say("before", sim=AT_ONCE)
    seq = len(talk.types())
    assert guarded.http.post("/checkpoints", json={"name": "step-40", "cut": "drain"}).status_code == 200
    [made] = guarded.get("/checkpoints")["checkpoints"]
    assert made["sessions"] > MANY
    expect(page.locator(f"{ROWS}[data-key*='step-40'] td").nth(2)).to_have_text(str(made["sessions"]))
    talk.say("after", sim=AT_ONCE)
    guarded.talk(session_id="later-1")

    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui#/checkpoint/step-40?of=default")
    expect(page.locator("nav a[aria-current]")).to_have_text("Checkpoints")
    then = page.locator(f"{ROWS}[data-key='kept-0'] td")
    expect(then.nth(0)).to_have_text(str(seq))
    expect(then.nth(1)).to_have_text("2 events")
    restore = f"turnlog checkpoint restore step-40 --run 'default' --url {guarded.base_url}"
    assert copied(page, "Copy the restore's command") == restore
    assert guarded.http.post("/checkpoints/step-40/restore").status_code == 200
    expect(then.nth(1)).to_have_text("3 events")
    until(scrolled_to(page, "main .foot:text-is('All shown')"))
    until(scrolled_to(page, f"{ROWS}[data-key='many-{MANY - 1:04}']"))
    watched.go("#/checkpoints")
    expect(page.locator(ROWS)).to_have_count(2)
    expect(page.locator(ROWS).first).to_contain_text("step-40")
    expect(page.locator(ROWS).first.locator("td").nth(5)).to_have_text("restore")

    watched.go("#/checkpoint/step-40")
    page.locator(f"{ROWS}[data-key='kept-0'] a").first.click()
    page.wait_for_url(f"**/ui#/session/kept-0?seq={seq}")
    page.locator(".sessiondetails > summary").click()
    facts = page.locator(".sessionfacts div", has_text="In checkpoints")
    expect(facts).to_contain_text(f"step-40 at event {seq}")
    facts.get_by_role("link", name=f"event {seq + 2}").click()
    page.locator(".act", has_text="after").wait_for()

    whole = {"name": "step-40", "run": "*"}
    assert guarded.http.post("/checkpoints", json=whole).status_code == 200
    watched.go("#/checkpoints")
    rows = page.locator(ROWS, has_text="step-40")
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Refresh").click()
    expect(page.locator(ROWS)).to_have_count(3)
    watched.go("#/session/kept-0")
    page.locator(".sessiondetails > summary").click()
    facts.get_by_role("link", name="step-40", exact=True).first.click()
    page.wait_for_url("**/ui#/checkpoint/step-40?of=*")
    for of in ("*", "default"):
        watched.go(f"#/checkpoint/step-40?of={of}")
        page.locator(f"{ROWS}[data-key='kept-0']").wait_for()
        assert f"--run '{of}' " in copied(page, "Copy the restore's command")


def test_a_server_that_is_gone_or_cannot_write_says_so_until_it_can(watched: Watched, guarded: Stand) -> None:
    """Somebody else holds the file's lock while it starts again; a full disk does the same to it."""
    watched.expected = ("401 (Unauthorized)", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    page = signed_in(watched, "#/?q=again-")
    page.wait_for_selector("text=No session matches these filters")
    guarded.server.stop()
    page.wait_for_selector("#banner:has-text('No connection to the server')")
    with file_locked(guarded.url):
        guarded.server.start()
        page.wait_for_selector("#read-only:has-text('Read-only: the database answered SQLITE_BUSY')")
        watched.go("#/")
        page.wait_for_selector(ROWS)
        watched.go("#/?q=again-")
    expect(page.locator("#read-only")).to_be_hidden()
    assert guarded.http.post("/sessions", json={"session_id": "again-1"}).status_code == 200
    page.wait_for_selector(f"{ROWS}[data-key=again-1]")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#connection")).to_have_text("live")
