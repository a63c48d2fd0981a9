"""Clients that mark no retry: what breaks on the way costs one generation and one turn, in a line and in a tree.

Claude Code and Codex retry so: the same body after half a second, without a key or a count.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import httpx
import pytest
from helpers.databases import SqliteTemplate
from integration.stand import Message, Stand, Talk, held, until, user

from app.crash_points import VARIABLE
from fault.forking import ForkedServer
from fault.verified import verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long


class Way(NamedTuple):
    """How a client talks: the history of its session, and the protocol."""

    history: Literal["linear", "tree"]
    protocol: str


LINE, TREE = Way("linear", "chat"), Way("tree", "chat")
MESSAGES, RESPONSES = Way("tree", "messages"), Way("tree", "responses")

LARGE: dict[str, Any] = {"experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1}, "completion_tokens": 6000}
"""A reply of some 12 MB: more than the buffers of a socket hold, which grow to 4 MB."""


class Site:
    """A store and its server, which a test may kill."""

    def __init__(self, url: str, server: ForkedServer, engine: SimulatorProcess) -> None:
        self.url, self.server, self.engine = url, server, engine
        self.stand = Stand(server, engine.base_url)

    def restart(self, **settings: str) -> None:
        self.stand.close()
        self.server.start(**settings)
        self.stand = Stand(self.server, self.engine.base_url)

    def talk(self, way: Way) -> Talk:
        """A session with one turn."""
        talk = self.stand.talk(way.protocol, history=way.history)
        talk.say("Before")
        return talk

    def again(self, talk: Talk) -> Talk:
        """The same client after a restart."""
        known = self.stand.known(talk.id, talk.protocol)
        known.messages = talk.messages
        return known


@pytest.fixture(scope="module")
def site(
    engine: SimulatorProcess, sqlite_template: SqliteTemplate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("unmarked")
    url = sqlite_template.copy(folder / "turnlog.db")
    server = ForkedServer(folder, url, [engine.base_url]).start()
    made = Site(url, server, engine)
    yield made
    made.stand.close()
    made.server.stop()
    verified(url)


def fields(sim: dict[str, Any]) -> dict[str, Any]:
    return {"sim": sim, "return_routed_experts": "experts" in sim}


def ask(talk: Talk, messages: list[Message], **sim: Any) -> httpx.Response:
    return talk.chat(messages, **fields(sim))


def engine_error(site: Site, way: Way) -> tuple[Talk, httpx.Response]:
    talk = site.talk(way)
    sent = [*talk.messages, user("Again?")]
    assert site.stand.sim.post("/sim/faults", json={"fault": "status_503"}).status_code == 200
    assert ask(talk, sent).status_code >= 500
    return talk, ask(talk, sent)


def dropped_before_the_commit(site: Site, way: Way) -> tuple[Talk, httpx.Response]:
    """The connection ends before the first byte, and the retry comes after the commit."""
    talk = site.talk(way)
    sent = [*talk.messages, user("Again?")]
    with held(site.stand.sim):
        hang_up(site, talk, sent)
    until(lambda: "ReplyUndelivered" in talk.types())
    return talk, ask(talk, sent)


def partial_reply(site: Site, way: Way) -> tuple[Talk, httpx.Response]:
    """As before, and the client believes that it has the beginning of the reply: Codex sends that back."""
    talk = site.talk(way)
    sent, sim = [*talk.messages, user("Again?")], {"text": "Half of it", "tool_calls": False}
    with held(site.stand.sim):
        hang_up(site, talk, sent, **sim)
    until(lambda: "ReplyUndelivered" in talk.types())
    return talk, ask(talk, [*sent, {"role": "assistant", "content": "Half"}], **sim)


def dropped_while_the_reply_leaves(site: Site, way: Way) -> tuple[Talk, httpx.Response]:
    talk = site.talk(way)
    sent = [*talk.messages, user("Again?")]
    hang_up(site, talk, sent, read=1 << 16, **LARGE)
    until(lambda: "ReplyUndelivered" in talk.types())
    return talk, ask(talk, sent, **LARGE)


def killed(site: Site, way: Way) -> tuple[Talk, httpx.Response]:
    talk = site.talk(way)
    sent = [*talk.messages, user("Again?")]
    site.restart(**{VARIABLE: "after_commit:1"})
    talk = site.again(talk)
    with pytest.raises(httpx.TransportError):
        ask(talk, sent)
    assert site.server.ended() == -signal.SIGKILL
    site.restart()
    return (again := site.again(talk)), ask(again, sent)


def hang_up(site: Site, talk: Talk, messages: list[Message], *, read: int = 0, **sim: Any) -> None:
    """Send a request and end the connection after `read` bytes of its reply, or once the engine has it."""
    before = talk.generations()
    request = site.stand.http.build_request("POST", talk.chat_path, json=talk.body(messages, **fields(sim)))
    head = f"POST {talk.chat_path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(request.content)}\r\n\r\n"
    address = httpx.URL(site.server.base_url)
    with contextlib.closing(socket.create_connection((address.host, address.port))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(head.replace("host: x", f"host: {address.host}").encode() + request.content)
        if read:
            assert client.recv(read)
            # A reset: what was sent and not read is lost.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            until(lambda: talk.generations() > before)


Fault = Callable[[Site, Way], tuple[Talk, httpx.Response]]

FAULTS: dict[str, Fault] = {
    "engine answers 503": engine_error,
    "connection ends while the engine works, retry after the commit": dropped_before_the_commit,
    "connection ends, retry holds a beginning of the reply": partial_reply,
    "connection ends while the reply leaves": dropped_while_the_reply_leaves,
    "kill between commit and reply": killed,
}

WAYS: dict[str, tuple[Way, ...]] = {
    "engine answers 503": (MESSAGES,),
    "connection ends while the engine works, retry after the commit": (LINE, RESPONSES),
    "connection ends, retry holds a beginning of the reply": (LINE, TREE, RESPONSES),
    "connection ends while the reply leaves": (LINE, TREE),
    "kill between commit and reply": (LINE, MESSAGES),
}


@pytest.mark.parametrize(
    ("fault", "way"),
    [pytest.param(fault, way, id=f"{fault}-{'-'.join(way)}") for fault, ways in WAYS.items() for way in ways],
)
def test_one_generation_and_one_turn(site: Site, fault: str, way: Way) -> None:
    assert site.stand.sim.post("/sim/reset").status_code == 200
    talk, reply = FAULTS[fault](site, way)
    assert reply.status_code == 200
    refused = fault.startswith("engine answers")
    assert (talk.generations() - 1 - refused, len(talk.committed()) - 1) == (1, 1)
    [row] = talk.rows()
    assert [span["turn"] for span in row["turns"]] == [event["turn"] for event in talk.committed()]
    # It was given again, so the same body sent once more is a new request.
    assert "x-turnlog-replayed" not in ask(talk, [*talk.messages, user("Again?")]).headers


def test_five_identical_requests_are_five_generations_though_one_was_turned_away(site: Site) -> None:
    """The marked retry of a request that was turned away joins none of the others, whose clients wait."""
    talk = site.talk(Way("tree", "chat"))
    sent = [*talk.messages, user("Sample")]
    with ThreadPoolExecutor(5) as threads:
        with held(site.stand.sim):
            calls = [threads.submit(ask, talk, sent) for _ in range(4)]
            site.stand.until_generating(talk, 5)
            calls.append(threads.submit(talk.chat, sent, headers={"x-stainless-retry-count": "1"}))
            site.stand.until_generating(talk, 6)
        replies = [call.result() for call in calls]
    assert [reply.status_code for reply in replies] == [200] * 5
    assert (talk.generations(), len(talk.committed()), len(talk.rows())) == (6, 6, 5)
