"""Turns with large replay payloads when the server or a worker dies: whole, or not there at all."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.pools import children, gone
from integration.patient import answered
from integration.routing import BOTH, EXPERTS, KINDS, Session, fetched, problems, rows_in, session_of, text_of
from integration.stand import FIRST_TURN, Stand, error_of, serving, until, user

from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

LARGE: dict[str, Any] = {
    "experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1},
    "indexer_topk": {"layers": 1, "top_k": 4},
    "completion_tokens": 5000,
}
"""About 10 MB of base64, and 7 of ids that cannot be narrowed: eight chunks, written ahead of the commit."""

SLOW: dict[str, Any] = {
    "experts": {"layers": 48, "top_k": 8, "nested": True},
    "indexer_topk": {"layers": 1, "top_k": 4},
    "completion_tokens": 4000,
}
"""Megabytes of nested lists: some hundred milliseconds of a worker."""

RETURN: dict[str, Any] = {"return_routed_experts": True, "return_indexer_topk": True}
KEY = {"idempotency-key": "k"}


@pytest.fixture(scope="module")
def large(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server that asks for both kinds, with one worker."""
    environment = {**BOTH, "TURNLOG_WORKERS": "1"}
    with serving(tmp_path_factory.mktemp("large"), engine.base_url, environment=environment) as made:
        yield made


@pytest.fixture
def stand(large: Stand) -> Stand:
    """The server, alive again if another test left it dead."""
    if not large.server.answers():
        large.server.kill()
        large.server.start()
    return large


class Store:
    """A look into the server's database while it runs."""

    def __init__(self, stand: Stand, talk: Session) -> None:
        self._connection = sqlite3.connect(stand.server.database_path, isolation_level=None, timeout=10)
        self._id = talk.id

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def count(self, table: str, condition: str = "1") -> int:
        query = f"SELECT count(*) FROM {table} WHERE session_id = ? AND {condition}"
        found: int = self._connection.execute(query, (self._id,)).fetchone()[0]
        return found

    def until_more_chunks(self, than: int) -> None:
        """Look often: a chunk is written in some milliseconds."""
        deadline = time.monotonic() + 20
        while self.count("chunks") <= than:
            assert time.monotonic() < deadline, "no chunk was written"
            time.sleep(0.0003)


def lost(call: Future[httpx.Response]) -> bool:
    return isinstance(call.exception(timeout=30), httpx.TransportError)


def killed_in_mid_commit(stand: Stand, talk: Session, call: Future[httpx.Response], before: int) -> int:
    """Kill the server when some of the turn's chunks are on disk; how many are, or 0 if it had committed already."""
    with Store(stand, talk) as store:
        store.until_more_chunks(before)
        os.kill(stand.server.pid, signal.SIGSTOP)
        staged = store.count("chunks") - before
        is_open = store.count("open_turns") == 1
        stand.server.kill()
    assert lost(call) or not is_open
    return staged if is_open else 0


def test_a_kill_between_the_chunks_and_their_commit_leaves_nothing(stand: Stand) -> None:
    for _ in range(10):
        talk = session_of(stand)
        talk.say("Hello", sim={**LARGE, "completion_tokens": 20}, **RETURN)
        kept = fetched(talk, 1).rows
        with Store(stand, talk) as store:
            before = store.count("chunks")
        sent = [*talk.messages, user("Large")]
        call = stand.meanwhile(talk.chat, sent, headers=KEY, sim=LARGE, **RETURN)
        staged = killed_in_mid_commit(stand, talk, call, before)
        assert problems(stand) == []
        stand.server.start()
        if staged:
            break
    else:
        pytest.fail("the server was never caught in mid-commit")
    until(lambda: talk.types()[-1] == "TurnAbandoned")  # The sweep of dead claims runs beside the first requests.
    with Store(stand, talk) as store:
        assert (store.count("chunks"), store.count("open_turns")) == (before, 0)
    assert problems(stand) == []
    assert np.array_equal(fetched(talk, 1).rows, kept)
    response = talk.chat(sent, headers=KEY, sim=LARGE, **RETURN)
    assert response.status_code == 200
    assert "x-turnlog-replayed" not in response.headers
    turn = int(response.headers["x-turnlog-turn"])
    assert np.array_equal(fetched(talk, turn).rows, rows_in(response.content))
    assert talk.chat(sent, headers=KEY, sim=LARGE, **RETURN).content == response.content
    assert problems(stand) == []


def test_what_was_acknowledged_is_given_again_to_the_byte_after_a_kill(stand: Stand) -> None:
    talk = session_of(stand)
    response = talk.chat([user("Large")], headers=KEY, sim=LARGE, **RETURN)
    stand.server.kill()
    stand.server.start()
    again = talk.chat([user("Large")], headers=KEY, sim=LARGE, **RETURN)
    assert again.headers["x-turnlog-replayed"] == "true"
    assert again.content == response.content
    assert len(response.content) > 8_000_000
    for kind in KINDS:
        assert np.array_equal(fetched(talk, 1, kind).rows, rows_in(response.content, kind))


def test_a_close_between_the_chunks_and_their_commit_leaves_nothing(stand: Stand) -> None:
    """The close stands in the same queue as the chunks, so it comes between them or behind the commit."""
    for _ in range(10):
        talk = session_of(stand)
        call = stand.meanwhile(talk.chat, [user("Large")], sim=LARGE)
        with Store(stand, talk) as store:
            until(lambda: store.count("chunks") > 0)
            assert stand.http.delete(talk.path).status_code == 204
            response = call.result()
            left = store.count("chunks")
        assert problems(stand) == []
        if response.status_code == 404:
            assert error_of(response) == (404, "session_closed")
            assert left == 0
            return
    pytest.fail("every commit was faster than the close")


def health(stand: Stand) -> dict[str, Any]:
    """The worker pool's counters."""
    found: dict[str, Any] = stand.http.get("/health").json()["pool"]
    return found


def the_worker(stand: Stand) -> int:
    until(lambda: health(stand)["alive"] == 1)
    [pid] = children(stand.server.pid)
    return pid


def stopped_over_a_reply(stand: Stand, talk: Session, worker: int, **headers: Any) -> Future[httpx.Response]:
    """A turn whose reply the worker has but has not begun to parse: it was stopped beforehand."""
    os.kill(worker, signal.SIGSTOP)
    call = stand.meanwhile(talk.chat, [user("Slow")], sim=SLOW, **headers, **RETURN)
    until(lambda: health(stand)["busy"] == 1)
    return call


@pytest.mark.parametrize("at_work", [False, True])
def test_a_worker_killed_over_a_reply_costs_the_turn_nothing(stand: Stand, at_work: bool) -> None:
    talk = session_of(stand)
    before = health(stand)["crashes"]
    worker = the_worker(stand)
    call = stopped_over_a_reply(stand, talk, worker)
    if at_work:
        os.kill(worker, signal.SIGCONT)
    os.kill(worker, signal.SIGKILL)
    response = call.result()
    assert response.status_code == 200
    assert health(stand)["crashes"] == before + 1
    assert np.array_equal(fetched(talk, 1).rows, rows_in(response.content))
    assert talk.types() == ["SessionCreated", *FIRST_TURN]
    assert the_worker(stand) != worker


def test_workers_end_with_a_server_that_is_killed_and_the_turn_can_be_taken_again(stand: Stand) -> None:
    talk = session_of(stand)
    worker = the_worker(stand)
    call = stopped_over_a_reply(stand, talk, worker, headers=KEY)
    os.kill(worker, signal.SIGCONT)
    stand.server.kill()
    assert gone(worker, 5)
    assert lost(call)
    stand.server.start()
    response = talk.chat([user("Slow")], headers=KEY, sim=SLOW, **RETURN)
    assert response.status_code == 200
    assert talk.types()[-5:] == ["TurnOpened", "TurnAbandoned", *FIRST_TURN]
    assert problems(stand) == []


def test_a_reply_that_two_workers_do_not_manage_is_refused(
    engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = {**BOTH, "TURNLOG_WORKERS": "1", "TURNLOG_WORKER_DEADLINE_S": "0.03"}
    with serving(tmp_path_factory.mktemp("hasty"), engine.base_url, environment=environment) as hasty:
        talk = session_of(hasty)
        response = talk.chat([user("Slow")], sim=SLOW)
        assert error_of(response) == (502, "worker_crash")
        [rejected] = [event for event in talk.events() if event["type"] == "TurnRejected"]
        assert (rejected["reason"], talk.committed()) == ("worker_crash", [])
        kept = hasty.http.get(f"{talk.path}/rejected/{rejected['fence']}")
        assert (kept.status_code, len(kept.content)) == (200, rejected["kept_bytes"])
        talk.say("Hello")
        assert problems(hasty) == []


class Client:
    """Takes turns with payloads, and insists on each over the server's deaths."""

    def __init__(self, stand: Stand, number: int) -> None:
        self.stand, self.talk = stand, session_of(stand, rollback_window=1)
        self.number = number
        self.replies: list[httpx.Response] = []

    def run(self) -> None:
        wish = {**LARGE, "completion_tokens": 300 + 100 * self.number, "latency_s": 0.02}
        for turn in range(5):
            sent = [*self.talk.messages, user(f"Question {turn}")]
            reply = answered(self.stand, self.talk, self.talk.body(sent, sim=wish, **RETURN), 30, f"{turn}")
            self.replies.append(reply)
            self.talk.messages = [*sent, reply.json()["choices"][0]["message"]]


def test_kills_at_any_moment_lose_no_row_of_an_acknowledged_turn(stand: Stand) -> None:
    clients = [Client(stand, number) for number in range(6)]
    runs = [stand.meanwhile(client.run) for client in clients]
    for turns in (6, 14, 22):
        until(lambda: sum(len(client.replies) for client in clients) >= turns)  # noqa: B023
        stand.server.kill()
        stand.server.start()
    for run in runs:
        run.result(timeout=60)
    assert problems(stand) == []
    for client in clients:
        talk = client.talk
        assert len(talk.committed()) == 5
        for reply in client.replies[3:]:
            turn = int(reply.headers["x-turnlog-turn"])
            assert np.array_equal(fetched(talk, turn).rows, rows_in(reply.content))
        [row] = talk.rows(replay="true")
        assert row["rows"] == len(row["tokens"]) - 1
        assert text_of(client.replies[-1].content, EXPERTS) not in (None, b"null")
        with closing(sqlite3.connect(stand.server.database_path)) as connection:
            orphans = connection.execute(
                "SELECT count(*) FROM chunks WHERE session_id = ? AND fence NOT IN "
                "(SELECT seq FROM events WHERE events.session_id = chunks.session_id AND type = 'TurnOpened')",
                (talk.id,),
            ).fetchone()[0]
        assert orphans == 0
