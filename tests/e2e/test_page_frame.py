"""Signing in, verdicts, a lost connection, long lists, checkpoints: on a server with a token."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from fault.locks import file_locked
from integration.stand import TIMEOUT_S, Stand, Talk, standing, until
from playwright.sync_api import Page, Route, expect

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
    titles = {"groups": "Groups", "search?q=x": "Search", "exports": "Exports", "session/of-a-team": "of-a-team"}
    for place, title in titles.items():
        watched.go(f"#/{place}")
        expect(page.locator("main h1")).to_have_text(title)
    expect(page.locator(".said").first).to_be_visible()
    watched.go("#/session/many-0001")
    expect(page.locator("main .message")).to_contain_text("There is no session")
    assert guarded.http.delete("/runs/team/token").status_code == 204
    held = {"authorization": f"Bearer {token}"}
    until(lambda: httpx.get(f"{guarded.base_url}/sessions", headers=held).status_code == 401)
    page.reload()
    page.wait_for_selector("#token")


def said(stand: Stand, talk: Talk, turn: int | None = None) -> dict[str, tuple[Any, str | None]]:
    """Value and writer by name, of the session or of a turn."""
    view = stand.get(f"/ui/api{talk.path}")["annotations"]
    return {one["name"]: (one.get("value"), one["writer"]) for one in view.get(str(turn or 0), ())}


def test_a_person_judges_a_session_and_its_turns(watched: Watched, guarded: Stand) -> None:
    """By keyboard, in a session that is closed: with a thumb, as a number, as a text, a note, tags. What is one's own
    can be deleted; of others it is said that it is replaced, and when they wrote it."""
    watched.expected = ("401 (Unauthorized)", "400 (Bad Request)")
    talk = guarded.talk(session_id="judged-1")
    talk.say("Hello", sim=AT_ONCE)
    assert guarded.http.delete(talk.path).status_code == 204
    talk.annotate("grade", 0.25, writer="judge-2")
    talk.annotate("why", "It loops. " * 40, writer="judge-2")
    talk.column(1, "teacher", [None] * talk.committed()[0]["output_tokens"], writer="teacher")
    page = signed_in(watched, f"#/session/{talk.id}")
    own, form = page.get_by_role("group", name="Verdicts", exact=True), page.get_by_role("form", name="Judge")
    expect(own.locator(".verdict", has_text="grade 0.25 judge-2")).to_contain_text(re.compile(r"judge-2, .* ago"))
    expect(own.locator("details summary", has_text="It loops.")).to_be_visible()

    def write(*keys: str, name: str = "", text: str = "") -> None:
        page.keyboard.press("v")
        expect(form.locator("textarea")).to_be_focused()
        if name:
            form.get_by_label("Name", exact=True).fill(name)
            form.locator("textarea").focus()
        page.keyboard.type(text)
        for key in keys:
            page.keyboard.press(key)

    write("Enter", text="0.5")
    writer = form.get_by_label("Your name")
    expect(writer, "nobody has said yet who judges").to_be_focused()
    assert said(guarded, talk).keys() == {"grade", "why"}
    page.keyboard.type("ann")
    assert barriers(page) == []
    page.keyboard.press("Enter")
    expect(own.locator(".verdict", has_text="verdict 0.5 ann")).to_be_visible()
    expect(form).to_be_hidden()
    expect(own.get_by_role("button", name="Judge")).to_be_focused()
    write("Shift+Tab", "Shift+Tab", "Enter")
    expect(own.locator(".verdict", has_text="verdict failed ann")).to_be_visible()
    expect(own.locator(".verdict", has_text="verdict"), "another value of the same name replaces it").to_have_count(1)
    write("Enter", name="note", text="It loops <b>here</b>, 1.")
    expect(own.locator(".verdict", has_text="note It loops <b>here</b>, 1. ann")).to_be_visible()
    write("Enter", name="tags", text="loop, look at")
    expect(own.get_by_role("link", name="look at")).to_have_attribute("href", "#/?tag=look+at")
    written = {"note": "It loops <b>here</b>, 1.", "tags": ["look at", "loop"], "verdict": {"passed": False}}
    assert said(guarded, talk).items() >= {name: (value, "ann") for name, value in written.items()}.items()
    assert barriers(page) == []

    page.keyboard.press("v")
    form.get_by_label("Name", exact=True).fill("tags")
    expect(form.locator("textarea")).to_have_value("look at, loop")
    form.locator("textarea").fill("x" * 129)
    page.keyboard.press("Enter")
    expect(form.get_by_role("alert")).to_contain_text("tags")
    form.get_by_role("button", name="Delete").click()
    expect(own.locator(".verdict", has_text="tags")).to_have_count(0)
    page.keyboard.press("v")
    form.get_by_label("Name", exact=True).fill("grade")
    expect(form).to_contain_text("replaces that of judge-2")
    expect(form.get_by_role("button", name="Delete"), "it is another's").to_be_hidden()
    page.keyboard.press("Escape")
    expect(form).to_be_hidden()
    assert said(guarded, talk)["grade"] == (0.25, "judge-2")

    of_turn = page.get_by_role("group", name="Verdicts of turn 1")
    expect(of_turn.locator(".verdict", has_text="teacher")).to_contain_text("float32 over output teacher")
    of_turn.get_by_role("button", name="Judge").click()
    form.get_by_role("button", name="Passed").click()
    expect(of_turn.locator(".verdict", has_text="verdict passed ann")).to_be_visible()
    assert said(guarded, talk, 1)["verdict"] == ({"passed": True}, "ann")


def test_a_queue_is_judged_by_keys(watched: Watched, guarded: Stand) -> None:
    """Sessions without a verdict, the oldest first: one is judged, taken back, judged again, one skipped, one given a
    number; one that somebody else judges meanwhile goes."""
    talks = [guarded.talk(session_id=f"queue-{number}", group_id="queue") for number in range(5)]
    for number, talk in enumerate(talks):
        talk.say(f"Task {number}", sim=AT_ONCE)
    talks[1].annotate("verdict", {"passed": True}, writer="judge-2")
    page = signed_in(watched, "#/?group_id=queue")
    expect(page.get_by_role("link", name="Judge")).to_have_attribute("href", re.compile("group_id=queue"))
    page.keyboard.press("v")
    queue = page.get_by_role("region", name="Queue")

    def at(number: int, progress: str) -> None:
        expect(page.locator("main .sessionhead h1")).to_have_text(talks[number].id)
        expect(queue).to_contain_text(progress)

    at(0, "4 of 4 left")
    assert barriers(page) == []
    page.keyboard.press("y")
    expect(queue.get_by_label("Your name"), "nobody has said yet who judges").to_be_focused()
    page.keyboard.type("ann")
    page.keyboard.press("Enter")
    at(2, "3 of 4 left")
    assert said(guarded, talks[0])["verdict"] == ({"passed": True}, "ann")
    held: list[Route] = []
    page.route("**/annotations/verdict*", lambda route: held.append(route))
    page.keyboard.press("u")
    talks[2].annotate("meanwhile", 1)
    expect(page.locator(".verdict", has_text="meanwhile")).to_be_visible()
    until(lambda: page.wait_for_timeout(20) or held)
    held[0].continue_()
    at(0, "4 of 4 left")
    page.unroute_all()
    expect(queue).not_to_contain_text("has left the queue")
    assert said(guarded, talks[0]) == {}
    page.keyboard.press("2")
    at(2, "3 of 4 left")
    assert said(guarded, talks[0])["verdict"] == ({"passed": False}, "ann")
    page.keyboard.press("s")
    at(3, "2 of 4 left")
    talks[3].annotate("verdict", 0.5, writer="ben")
    at(4, "1 of 3 left")
    expect(queue).to_contain_text("queue-3 has left the queue")
    page.keyboard.press("u")
    at(2, "2 of 3 left")
    queue.get_by_label("Number or text").fill("0.75")
    queue.get_by_role("button", name="Save").click()
    at(4, "1 of 3 left")
    page.keyboard.press("n")
    expect(page.locator("main .message")).to_contain_text("Nothing is left to judge.")
    assert barriers(page) == []
    values = [said(guarded, talk)["verdict"][0] for talk in talks]
    assert values == [{"passed": False}, {"passed": True}, 0.75, 0.5, {"passed": False}]


PUT = """([address, headers]) =>
    fetch(address, { method: "PUT", credentials: "include", headers, body: '{"value": "written"}' })
        .then((response) => String(response.status), (error) => error.name)"""


def test_no_other_origin_writes_an_annotation(watched: Watched, guarded: Stand, tmp_path: Path) -> None:
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
    expect(top).to_contain_text("0.500")
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
    facts = page.locator(".sessionfacts div", has_text=re.compile("In [0-9]+ checkpoints?"))
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
