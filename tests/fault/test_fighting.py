"""Several API processes fight over the same sessions on one PostgreSQL: each key has one turn, each turn one reply.

That the replies have one order too, the simulation judges (`test_simulation.py`, `test_simulation_postgres.py`).
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from helpers.clusters import Cluster
from integration.stand import error_of, user

from fault.processes import serving
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

FIGHTS = pytest.mark.fault(8, "processes fight over the same sessions on PostgreSQL")
CRASHES = pytest.mark.fault(8, "processes fight over the same sessions on PostgreSQL, which crashes")
CLIENTS, TURNS = 10, 15

LINE, TREE = {"rollback_window": 2}, {"history": "tree"}
EXPECTED = {"session_busy"}
OF_A_LINE = {"history_mismatch", "rollback_too_deep"}
OF_CRASHES = {"claim_lost", "store_unavailable", "overloaded"}


@pytest.fixture(scope="module")
def urls(cluster: Cluster, engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Three processes on one database."""
    with serving(tmp_path_factory.mktemp("fighting"), 3, cluster.url, engine.base_url) as processes:
        yield processes.urls


class Fight:
    """Clients that go on from any reply that any of them has got, and ask two processes at once for the same."""

    def __init__(self, urls: Sequence[str], session_ids: Sequence[str]) -> None:
        self.replies: dict[tuple[str, str], list[httpx.Response]] = {}
        """By session and key those with a turn."""
        self.refused: set[str] = set()
        self._urls = urls
        self._histories: dict[str, list[list[dict[str, str]]]] = {one: [[]] for one in session_ids}

    def client(self, number: int) -> None:
        rng = random.Random(f"fight {number}")
        with ThreadPoolExecutor(2) as threads, httpx.Client(timeout=60) as http:
            for turn in range(TURNS):
                session_id = rng.choice(list(self._histories))
                key, histories = f"{number} {turn}", self._histories[session_id]
                messages = [*rng.choice(histories[-3:]), user(f"Turn {key}")]
                servers = rng.sample(self._urls, rng.choice((1, 2)))
                for reply in threads.map(lambda url: self._ask(http, url, session_id, key, messages), servers):  # noqa: B023
                    if reply is not None:
                        self.replies.setdefault((session_id, key), []).append(reply)
                        histories.append([*messages, reply.json()["choices"][0]["message"]])

    def _ask(
        self, http: httpx.Client, url: str, session_id: str, key: str, messages: list[dict[str, str]]
    ) -> httpx.Response | None:
        body = {"messages": messages, "sim": {"latency_s": 0.01, "completion_tokens": 6, "reasoning": False}}
        reply = http.post(
            f"{url}/sessions/{session_id}/v1/chat/completions", json=body, headers={"idempotency-key": key}
        )
        if reply.status_code != 200:
            self.refused.add(error_of(reply)[1])
            return None
        return reply

    def acknowledged(self) -> list[Acknowledged]:
        """Each key has one turn and one reply, whoever gave it, and none has another's."""
        turns: set[tuple[str, str]] = set()
        for (session_id, key), replies in self.replies.items():
            [(turn, _)] = {(reply.headers["x-turnlog-turn"], reply.content) for reply in replies}
            assert (session_id, turn) not in turns, key
            turns.add((session_id, turn))
        return [acknowledgement(session_id, reply) for (session_id, _), [reply, *_] in self.replies.items()]


@contextlib.contextmanager
def crashing(cluster: Cluster, pauses_s: Sequence[float]) -> Iterator[None]:
    """PostgreSQL crashes after each of these pauses, and starts again."""
    stopped = threading.Event()

    def crash() -> int:
        crashes = 0
        for pause_s in pauses_s:
            if not stopped.wait(pause_s):
                cluster.restart("immediate")
                crashes += 1
        return crashes

    with ThreadPoolExecutor(1) as threads:
        crashes = threads.submit(crash)
        try:
            yield
        finally:
            stopped.set()
        assert crashes.result() > 0 or not pauses_s


@pytest.mark.parametrize(
    ("pauses_s", "explained"),
    [
        pytest.param((), EXPECTED | OF_A_LINE, marks=FIGHTS, id="fights"),
        pytest.param((0.3, 1.0), EXPECTED | OF_A_LINE | OF_CRASHES, marks=CRASHES, id="crashes"),
    ],
)
def test_each_key_has_one_turn(
    urls: list[str], cluster: Cluster, tally: Tally, pauses_s: Sequence[float], explained: set[str]
) -> None:
    session_ids = [
        httpx.post(f"{urls[0]}/sessions", json=kind, timeout=60).json()["session_id"] for kind in (LINE, LINE, TREE)
    ]
    fight = Fight(urls, session_ids)
    with crashing(cluster, pauses_s), ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(fight.client, range(CLIENTS)))
    tally.tried += CLIENTS * TURNS
    assert fight.refused <= explained
    assert "session_busy" in fight.refused
    assert any("x-turnlog-replayed" in reply.headers for replies in fight.replies.values() for reply in replies)
    verified(cluster.url, fight.acknowledged(), tally)


HELLO = [user("Hello")]
ELSEWHERE = [*HELLO, {"role": "assistant", "content": "No"}, user("Why?")]


@pytest.mark.parametrize(
    ("messages", "key"),
    [(HELLO, "k"), (ELSEWHERE, "k"), (ELSEWHERE, "l"), (HELLO, "l")],
    ids=["a replay", "a key with another body", "a mismatch", "a rollback"],
)
def test_what_one_process_closed_is_closed_at_the_others(
    urls: list[str], messages: list[dict[str, str]], key: str
) -> None:
    """The others answer from what they remember only where that cannot have changed: 404 comes before all else."""
    with httpx.Client(base_url=urls[0], timeout=60) as first, httpx.Client(base_url=urls[1], timeout=60) as second:
        session = "/sessions/" + first.post("/sessions").json()["session_id"]
        path = f"{session}/v1/chat/completions"
        assert second.post(path, json={"messages": HELLO}, headers={"idempotency-key": "k"}).status_code == 200
        assert first.delete(session).status_code == 204
        response = second.post(path, json={"messages": messages}, headers={"idempotency-key": key})
        assert error_of(response) == (404, "session_closed")
