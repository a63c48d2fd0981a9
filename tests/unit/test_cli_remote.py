"""How the command line speaks to a server, and what it says where that fails: one line, one exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.answering import Answer, Answering, Asked
from tables import rows
from typer.testing import CliRunner, Result

from turnlog.cli.commands import app_of


class Sayer(Answering):
    """A server that says what it is told to, the last of it for ever, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(self._next)
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.asked: list[tuple[str, str, str | None]] = []

    def _next(self, asked: Asked) -> Answer:
        self.asked.append((asked.method, asked.path, asked.header("authorization")))
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Answer(body, list(headers.items()), status)


def error(code: str, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "code": code, "param": None}}).encode()


@pytest.fixture
def sayer() -> Iterator[Sayer]:
    with Sayer() as made:
        yield made


@pytest.fixture
def run(clean_environment: Callable[..., None]) -> Callable[..., Result]:
    clean_environment()
    return lambda *arguments: CliRunner().invoke(app_of(), arguments)


def failed(result: Result, code: int = 1) -> str:
    """The one line with which a command fails."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def test_nobody_there_is_one_line(run: Callable[..., Result]) -> None:
    url = "http://127.0.0.1:9"
    assert failed(run("engines", "list", "--url", url)).startswith(f"turnlog: cannot connect to {url} (")
    assert "cannot connect" in failed(run("tail", "-f", "s", "--url", url))
    assert "cannot connect" in failed(run("export", "--url", url))
    assert "cannot connect" in failed(run("pause", "--fleet", "--url", url))


@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_a_password_in_an_address_is_refused_and_not_shown(run: Callable[..., Result], scheme: str) -> None:
    result = run("sessions", "--url", f"{scheme}://me:secret@127.0.0.1:1")
    assert result.exit_code == 2
    assert "use a token" in result.stderr
    assert "secret" not in result.output


@pytest.mark.parametrize("url", ["nowhere", "ftp://x", "http://", "http://[::1", "http://127.0.0.1:99999999"])
def test_what_is_no_url_is_wrong_usage(run: Callable[..., Result], url: str) -> None:
    assert "--url" in failed(run("engines", "list", "--url", url), 2)


def test_a_token_that_no_header_can_hold_is_not_echoed(run: Callable[..., Result]) -> None:
    line = failed(run("engines", "list", "--token", "se\ncret"), 2)
    assert "token" in line
    assert "cret" not in line


def test_the_servers_error_is_told_with_its_code(run: Callable[..., Result], sayer: Sayer) -> None:
    sayer.answers = [(404, {}, error("session_not_found", "session x\x1b[2J does not exist"))]
    assert failed(run("show", "x", "--url", sayer.base_url)) == (
        "turnlog: 404 session_not_found: session x\\x1b[2J does not exist"
    )
    sayer.answers = [(502, {"x-should-retry": "false"}, b"<html>of a proxy</html>")]
    assert (
        failed(run("engines", "list", "--url", sayer.base_url))
        == "turnlog: 502 without Turnlog's error format: is this the address of a Turnlog server?"
    )
    sayer.answers = [(200, {}, b"no json")]
    assert "is not JSON" in failed(run("engines", "list", "--url", sayer.base_url))
    sayer.answers = [(307, {"location": "http://elsewhere"}, b"")]
    assert failed(run("engines", "list", "--url", sayer.base_url)).startswith("turnlog: 307 without")


@pytest.mark.parametrize("command", [("engines", "list"), ("engines", "drain", "http://e:1")], ids=["read", "order"])
def test_it_asks_again_when_the_server_says(run: Callable[..., Result], sayer: Sayer, command: tuple[str, ...]) -> None:
    """By the client's rules. What would take too long is told at once."""
    unavailable = error("store_unavailable", "later")
    soon, late = ((503, {"retry-after": after}, unavailable) for after in ("0", "60"))
    engine = dict.fromkeys(("url", "state", "health", "in_flight", "dialect", "weight_version", "source", "last_error"))
    listed: dict[str, Any] = {"engines": [], "version": 0, **engine, "since": 0}
    sayer.answers = [soon, soon, (200, {}, json.dumps(listed).encode())]
    result = run(*command, "--json", "--url", sayer.base_url)
    assert (result.exit_code, json.loads(result.stdout)) == (0, listed)
    assert len(sayer.asked) == 3
    sayer.asked.clear()
    for answer in (late, (507, {}, error("store_full", "full")), (409, {"x-should-retry": "false"}, error("x", "no"))):
        sayer.answers = [answer]
        failed(run(*command, "--url", sayer.base_url))
    assert len(sayer.asked) == 3


def test_what_breaks_off_is_asked_for_again_once_the_server_has_answered(
    run: Callable[..., Result], sayer: Sayer
) -> None:
    page = {"sessions": [], "total": 0, "next_cursor": None, "tasks": {}}
    first = json.dumps({**page, "next_cursor": "more"}).encode()
    sayer.answers = [(200, {}, first), (200, {"content-length": "1000"}, b"{"), (200, {}, json.dumps(page).encode())]
    result = run("sessions", "--all", "--json", "--url", sayer.base_url)
    assert (result.exit_code, json.loads(result.stdout)) == (0, page)
    assert len(sayer.asked) == 3


def test_where_the_token_comes_from(
    run: Callable[..., Result], sayer: Sayer, clean_environment: Callable[..., None]
) -> None:
    sayer.answers = [(200, {}, b'{"engines": [], "version": 0}')]
    run("engines", "list", "--url", sayer.base_url)
    clean_environment(ADMIN_TOKEN="current, before", URL=sayer.base_url)
    run("engines", "list")
    clean_environment(ADMIN_TOKEN="current", TOKEN="own", URL=sayer.base_url)
    run("engines", "list")
    run("engines", "list", "--token", "given")
    sent = [None, "current", "own", "given"]
    assert [asked[2] for asked in sayer.asked] == [token and f"Bearer {token}" for token in sent]


def test_help_shows_no_token(run: Callable[..., Result], clean_environment: Callable[..., None]) -> None:
    clean_environment(TOKEN="canary", ADMIN_TOKEN="canary")
    for arguments in (("--help",), ("engines", "--help"), ("sessions", "--help")):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "canary" not in result.output


def test_an_id_stays_one_part_of_the_path(run: Callable[..., Result], sayer: Sayer) -> None:
    sayer.answers = [(404, {}, error("session_not_found", "no"))]
    run("tail", "../engines?x=1", "--url", sayer.base_url)
    run("pause", "a/b", "--url", f"{sayer.base_url}/behind/")
    assert [asked[1] for asked in sayer.asked] == [
        "/sessions/..%2Fengines%3Fx%3D1/events?after=0&follow=false",
        "/behind/adapters/a%2Fb/pause",
    ]


@pytest.mark.parametrize("arguments", rows("cli_wrong_usage"))
def test_what_does_not_fit_together_is_wrong_usage(run: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
