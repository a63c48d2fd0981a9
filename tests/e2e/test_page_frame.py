"""Signing in, a lost connection, and a long list: on a server with a token and without engines."""

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
from integration.stand import TIMEOUT_S, Stand, serving, until
from playwright.sync_api import expect

from e2e.page import Watched, barriers, require_chromium

pytestmark = pytest.mark.long

Watch = Callable[..., Watched]

TOKEN = "an-admin-token-of-the-page-tests"
MANY = 450
"""More than two pages of the list."""

ROWS = "main tbody tr[data-key]"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    require_chromium()
    with serving(tmp_path_factory.mktemp("guarded"), environment={"TURNLOG_ADMIN_TOKEN": TOKEN}) as stand:
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
    made: Watched = watch(guarded.server.base_url)
    made.expected = ("401 (Unauthorized)",)
    return made


def signed_in(watched: Watched, place: str = "#/") -> None:
    page = watched.page
    page.goto(f"{watched.base_url}/ui{place}")
    page.fill("#token", TOKEN)
    page.click("button.primary")
    page.wait_for_selector("#connection[data-state=live]")


def test_sign_in_and_out(watched: Watched) -> None:
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

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("text=Copy as curl")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert '-H "Authorization: Bearer $TURNLOG_ADMIN_TOKEN"' in copied
    assert TOKEN not in copied
    environment = {**os.environ, "TURNLOG_ADMIN_TOKEN": TOKEN}
    ran = subprocess.run(["bash", "-c", copied], env=environment, capture_output=True, check=True, timeout=30)
    assert json.loads(ran.stdout)["groups"] == []
    assert TOKEN not in page.content()

    page.click("#sign-out")
    page.wait_for_selector("#token")
    assert not page.context.cookies()
    page.reload()
    page.wait_for_selector("#token")


def test_a_note_is_written_on_the_page(watched: Watched, guarded: Stand) -> None:
    """By keyboard, in a session that is closed; what differs alone is written."""
    watched.expected = ("401 (Unauthorized)", "400 (Bad Request)")
    talk = guarded.talk(session_id="noted-1")
    assert guarded.http.delete(talk.path).status_code == 204
    signed_in(watched, f"#/session/{talk.id}")
    page = watched.page
    page.locator(".sessiondetails > summary").click()
    page.get_by_role("button", name="Edit note").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("It loops <b>here</b>.")
    page.keyboard.press("Tab")
    page.keyboard.type("loop, look at")
    assert barriers(page, "light") == []
    page.keyboard.press("Control+Enter")
    expect(page.locator(".sessionfacts >> text=It loops <b>here</b>.")).to_be_visible()
    expect(page.locator("form.noteform")).to_be_hidden()
    expect(page.get_by_role("button", name="Edit note")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.input_value("textarea[name=note]") == "It loops <b>here</b>."
    page.fill("input[name=tags]", "loop, " + "x" * 129)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".noteform [role=alert]")).to_contain_text("tags")
    page.fill("input[name=tags]", "")
    page.keyboard.press("Enter")
    expect(page.locator(".sessionfacts dt:has-text('Tags')")).to_have_count(0)
    written = [event for event in talk.events() if event["type"] == "AnnotationWritten"]
    assert [(one["name"], one.get("value")) for one in written] == [
        ("note", "It loops <b>here</b>."),
        ("tags", ["look at", "loop"]),
        ("tags", None),
    ]


def test_what_is_not_edited_of_a_note_stays_as_it_is(watched: Watched, guarded: Stand) -> None:
    """A tag with a comma, and line ends that a browser writes otherwise."""
    talk = guarded.talk(session_id="noted-3")
    tags = [" spaced", '"quoted", too', "a, b", "plain"]
    talk.noted(note="one\r\ntwo\n", tags=tags)
    signed_in(watched, f"#/session/{talk.id}")
    page = watched.page
    page.locator(".sessiondetails > summary").click()
    page.get_by_role("button", name="Edit note").click()
    field = page.locator("input[name=tags]")
    field.fill(f'{field.input_value()}, "new, too", newer')
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("form.noteform")).to_be_hidden()
    written = [event for event in talk.events() if event["type"] == "AnnotationWritten"][2:]
    assert [(one["name"], one["value"]) for one in written] == [("tags", sorted([*tags, "new, too", "newer"]))]


def test_no_other_origin_writes_a_note(watched: Watched, guarded: Stand, tmp_path: Path) -> None:
    """A page on another port of the same host: the browser sends it the cookie, and asks before it sends a PUT."""
    talk = guarded.talk(session_id="noted-2")
    signed_in(watched)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        thread = Thread(target=other.serve_forever)
        thread.start()
        try:
            page = watched.page.context.new_page()
            page.goto(f"http://127.0.0.1:{other.server_port}/")
            address = f"{watched.base_url}{talk.path}/annotations/note"
            for headers in ({}, {"x-turnlog-page": "1"}):
                assert page.evaluate(PUT, [address, headers]) == "TypeError"
            page.close()
        finally:
            other.shutdown()
            thread.join()
    note = {"x-turnlog-page": "1", "content-type": "application/json"}
    assert watched.page.evaluate(PUT, [address, note]) == "200", "the page itself may"
    assert [one["value"] for one in talk.events() if one["type"] == "AnnotationWritten"] == ["written"]


PUT = """([address, headers]) =>
    fetch(address, { method: "PUT", credentials: "include", headers, body: '{"value": "written"}' })
        .then((response) => String(response.status), (error) => error.name)"""


def test_a_long_list_keeps_the_document_small(watched: Watched, guarded: Stand) -> None:
    signed_in(watched, "#/?q=many-&sort=created_at&order=asc")
    page = watched.page
    expect(page.locator("main [role=status]").first).to_have_text(f"{MANY} sessions")
    scroller = page.locator("main .table-scroll")

    def is_shown(what: str) -> bool:
        """At the end of the list, which grows when more of it has come."""
        scroller.evaluate("element => { element.scrollTop = element.scrollHeight }")
        return page.locator(what).count() == 1

    until(lambda: is_shown(f"text=All {MANY} shown"))
    parameters = {"q": "many-", "sort": "created_at", "order": "asc", "limit": 500}
    in_order = [row["session_id"] for row in guarded.http.get("/ui/api/sessions", params=parameters).json()["sessions"]]
    last = in_order[-1]
    until(lambda: is_shown(f"{ROWS}[data-key={last}][aria-rowindex='{MANY + 1}']"))
    assert page.locator(ROWS).count() < 80
    page.locator(f"{ROWS}[data-key={last}] th a").focus()
    page.keyboard.press("Home")
    page.wait_for_selector(f"{ROWS}[data-key={in_order[0]}][aria-current]")


def test_what_changes_on_a_later_page_is_not_new(watched: Watched, guarded: Stand) -> None:
    signed_in(watched, "#/?q=many-&sort=created_at&order=asc")
    page = watched.page
    first = page.locator(ROWS).first
    key = first.get_attribute("data-key")
    later = guarded.http.get("/ui/api/sessions", params={"q": "many-", "limit": 1}).json()["sessions"][0]["session_id"]
    for session_id in (later, key):
        assert guarded.http.put(f"/sessions/{session_id}/reward", json={"reward": 0.5}).status_code == 200
    expect(first.locator("td").nth(9)).to_have_text("0.500")
    expect(page.locator("button.changed")).to_be_hidden()

    watched.go("#/?q=many-")
    top = page.locator(ROWS).first
    expect(top).to_have_attribute("data-key", str(key))
    assert guarded.http.put(f"/sessions/{later}/reward", json={"reward": 1}).status_code == 200
    expect(top).to_have_attribute("data-key", later)
    expect(page.locator("main .bar [role=status]")).to_have_text(f"{MANY} sessions")


def test_a_lost_connection_is_said_and_made_good(watched: Watched, guarded: Stand) -> None:
    watched.expected = ("401 (Unauthorized)", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    signed_in(watched, "#/?q=later-")
    page = watched.page
    page.wait_for_selector("text=No session matches these filters")
    guarded.server.stop()
    page.wait_for_selector("#banner:has-text('No connection to the server')")
    guarded.server.start()
    assert guarded.http.post("/sessions", json={"session_id": "later-1"}).status_code == 200
    page.wait_for_selector(f"{ROWS}[data-key=later-1]")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#connection")).to_have_text("live")


def test_a_server_that_cannot_write_says_so_until_it_can(watched: Watched, guarded: Stand) -> None:
    """Somebody else holds the file's lock while it starts; a full disk does the same to it."""
    watched.expected = ("401 (Unauthorized)", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    signed_in(watched, "#/")
    guarded.server.stop()
    with file_locked(guarded.url):
        guarded.server.start()
        watched.page.wait_for_selector("#read-only:has-text('Read-only: the database answered SQLITE_BUSY')")
        watched.page.wait_for_selector(ROWS)
    expect(watched.page.locator("#read-only")).to_be_hidden()
    assert guarded.http.post("/sessions", json={"session_id": "written-again"}).status_code == 200
