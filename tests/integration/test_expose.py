"""`turnlog expose`: a forwarder that dies in the middle of a reply costs no turn, and no generation."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fault.processes import serving as two_processes
from helpers.databases import Postgres

from integration import forwarder
from integration.cli import complaint, started
from integration.guarded import ADMIN, Guarded, bearer
from integration.stand import Stand, error_of, until, user
from turnlog import Turnlog

AGENT_S = 60


class Exposed:
    """A running `turnlog expose --json`, and the addresses that it tells."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told: list[str] = []
        self.said: list[str] = []
        self._readers = [
            threading.Thread(
                target=self._read, args=(process.stdout, lambda line: self.told.append(json.loads(line)["url"]))
            ),
            threading.Thread(target=self._read, args=(process.stderr, self.said.append)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, take: Callable[[str], None]) -> None:
        for line in stream:
            take(line)

    def ended(self) -> int:
        code = self.process.wait(AGENT_S)
        for reader in self._readers:
            reader.join()
        return code


@contextlib.contextmanager
def exposing(
    guarded: Guarded, folder: Path, *options: str, command: str | None = None, **more: Any
) -> Iterator[Exposed]:
    port = guarded.stand.server.port
    forward = shlex.split(command) if command else [sys.executable, forwarder.__file__, str(port), str(folder)]
    made = started(
        *("expose", "--json", *options, "--", *forward),
        folder=folder,
        environment={"TURNLOG_URL": guarded.stand.server.base_url, "TURNLOG_TOKEN": ADMIN},
        **more,
    )
    with made, contextlib.closing(made.stdout), contextlib.closing(made.stderr):  # type: ignore[type-var]
        exposed = Exposed(made)
        try:
            yield exposed
        finally:
            made.send_signal(signal.SIGTERM)
            exposed.ended()


def public_url(guarded: Guarded) -> Any:
    return guarded.admin.get("/public-url").json()["url"]


def test_an_agent_behind_a_forwarder_that_dies_loses_no_turn(guarded: Guarded, tmp_path: Path) -> None:
    """It comes back at its port, where the SDK repeats the request; then at another, which the session's `url` has."""
    with exposing(guarded, tmp_path) as exposed, Turnlog(guarded.stand.server.base_url, token=ADMIN) as turnlog:
        until(lambda: exposed.told)
        assert "4040" not in exposed.told[0], "what is local is not taken"
        session = turnlog.create_session(session_id=f"exposed-{os.getpid()}")
        assert session.url == f"{exposed.told[0]}/sessions/{session.id}"
        messages: list[Any] = []

        def ask(text: str, **options: Any) -> None:
            messages.append(user(text))
            with openai.OpenAI(base_url=f"{session.url}/v1", api_key=session.token, **options) as agent:
                key = {"Idempotency-Key": f"turn-{len(messages)}"}
                reply = agent.chat.completions.create(model="simulator", messages=messages, extra_headers=key)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))

        ask("One")
        (tmp_path / "port").write_text(exposed.told[0].rpartition(":")[2])
        (tmp_path / "cut").touch()
        ask("Two", max_retries=8)
        assert not (tmp_path / "cut").exists()
        assert exposed.told == exposed.told[:1]

        (tmp_path / "port").unlink()
        (tmp_path / "cut").touch()
        with pytest.raises(openai.APIConnectionError):
            ask("Three", max_retries=0)
        until(lambda: len(exposed.told) == 2)
        session = turnlog.create_session(session_id=session.id)
        assert session.url.startswith(exposed.told[1])
        messages.pop()
        ask("Three")
        [row] = turnlog.export(session_id=session.id)
        assert [turn["turn"] for turn in row["turns"]] == [1, 2, 3]
        assert len(guarded.stand.engine_requests(session.id)) == 3, "nothing was generated twice"
        exposed.process.send_signal(signal.SIGTERM)
        assert exposed.ended() == 0
    assert public_url(guarded) is None
    assert any("and on the other stream" in line for line in exposed.said), "what it prints is passed on"
    with pytest.raises(httpx.ConnectError):
        httpx.get(exposed.told[1])


GATE = ("--pattern", r"port (\d+)", "--public-url", "http://gate.example.org:{}")


@pytest.mark.parametrize(
    ("options", "printed", "told"),
    [
        ((), "tunnel: https://a.example.org/x?y https://b.example.org.", "https://b.example.org"),
        ((), "https://b.example.org\nsee https://docs.other.org", "https://b.example.org"),
        (("--pattern", r"at (\S+)"), "https://docs.example.org\nat bore.example.org:7", "http://bore.example.org:7"),
        (GATE, "Allocated port 40123 for remote forward", "http://gate.example.org:40123"),
        (("--public-url", "https://fixed.example.org/"), "https://b.example.org", "https://fixed.example.org"),
    ],
)
def test_the_address_is_found_or_said(
    guarded: Guarded, tmp_path: Path, options: tuple[str, ...], printed: str, told: str
) -> None:
    command = f"sh -c 'echo \"{printed}\" >&2; exec sleep 60'"
    with exposing(guarded, tmp_path, *options, command=command) as exposed:
        until(lambda: public_url(guarded) == told)
        made = guarded.admin.post("/sessions", json={}).json()
        assert made["url"] == f"{told}/sessions/{made['session_id']}"
        exposed.process.send_signal(signal.SIGINT)
        assert exposed.ended() == 130
    assert public_url(guarded) is None


def test_another_address_of_a_forwarder_that_lives_is_followed(guarded: Guarded, tmp_path: Path) -> None:
    say = "echo https://first.example.org; echo https://docs.other.org; read x < next; echo https://second.example.org"
    os.mkfifo(tmp_path / "next")
    with exposing(guarded, tmp_path, command=f"sh -c '{say}; sleep 60'") as exposed:
        until(lambda: public_url(guarded) == "https://first.example.org")
        (tmp_path / "next").write_text("go\n")
        until(lambda: public_url(guarded) == "https://second.example.org" and len(exposed.told) == 2)
    assert exposed.told == ["https://first.example.org", "https://second.example.org"]


def test_a_hangup_that_nohup_has_ignored_ends_nothing(guarded: Guarded, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command = "sh -c 'echo https://first.example.org; sleep 1; echo https://second.example.org; exec sleep 60'"
        with exposing(guarded, tmp_path, command=command, start_new_session=True) as exposed:
            until(lambda: exposed.told)
            exposed.process.send_signal(signal.SIGHUP)
            until(lambda: len(exposed.told) == 2)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_cannot_be_exposed_is_said_in_a_line(guarded: Guarded, stand: Stand, tmp_path: Path) -> None:
    at = "--url", guarded.stand.server.base_url, "--token", ADMIN
    assert "requires no token" in complaint("expose", "--url", stand.base_url, "--", "true")
    assert "exit code 3 before it printed an address" in complaint("expose", *at, "--", "sh", "-c", "exit 3")
    assert "could not be started" in complaint("expose", *at, "--", str(tmp_path / "none"))
    assert "--pattern" in complaint("expose", *at, "--pattern", "(", "--", "true", code=2)
    assert "--pattern" in complaint("expose", *at, "--public-url", "http://a:{}", "--", "true", code=2)
    with contextlib.ExitStack() as stack:
        stack.callback(stand.http.delete, "/public-url")
        insecure = complaint(
            *("expose", "--url", stand.base_url, "--insecure", "--public-url", "ftp://a", "--", "true")
        )
        assert "public address" in insecure, "the server was asked"


def test_an_address_ends_with_its_lease_or_by_its_own_name(guarded: Guarded) -> None:
    admin = guarded.admin
    put = {"url": "https://one.example.org/", "lease_s": 60}
    assert admin.put("/public-url", json=put).json()["url"] == "https://one.example.org"
    assert 0 < admin.get("/public-url").json()["lease_left_s"] <= 60
    assert admin.delete("/public-url", params={"url": "https://two.example.org"}).status_code == 204
    assert public_url(guarded) == "https://one.example.org"
    admin.put("/public-url", json={**put, "url": "https://two.example.org", "lease_s": 0.2})
    until(lambda: public_url(guarded) is None)
    assert admin.get("/public-url").json() == {"url": None, "lease_left_s": None, "needs_token": True}
    for wrong in ({"url": "ftp://a"}, {"url": "https://a?b"}, {"url": "https://a", "lease_s": 0}, {}):
        assert error_of(admin.put("/public-url", json=wrong)) == (400, "invalid_request")
    assert error_of(guarded.stranger.put("/public-url", json=put)) == (401, "unauthorized")


def test_every_process_gives_the_address(postgres: Postgres, tmp_path: Path) -> None:
    environment = {"TURNLOG_PUBLIC_URL": "https://set.example.org", "TURNLOG_ADMIN_TOKEN": ADMIN}
    with (
        postgres.database() as url,
        two_processes(tmp_path, 2, url, "http://127.0.0.1:9", environment=environment) as processes,
    ):
        first, second = (httpx.Client(base_url=one, headers=bearer(ADMIN)) for one in processes.urls)

        def begins(api: httpx.Client) -> str:
            return str(api.post("/sessions", json={}).json()["url"].partition("/sessions/")[0])

        with first, second:
            assert begins(first) == "https://set.example.org"
            first.put("/public-url", json={"url": "https://one.example.org"})
            until(lambda: begins(second) == begins(first) == "https://one.example.org")
            second.delete("/public-url")
            until(lambda: begins(first) == begins(second) == "https://set.example.org")
