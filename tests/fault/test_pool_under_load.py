"""Fault 3: children of the worker pool are killed, hang and run out of memory while turns are taken."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.pools import children
from integration.routing import BOTH
from integration.stand import Stand, Talk, error_of, serving, until, user

from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

CLIENTS = 6
TURNS = 5
"""Of a session, before its client begins another."""

WORKERS = 2
PATIENCE_S = 60.0
KINDS = ("killed", "hung", "out of memory")


@pytest.fixture(scope="module")
def pooled(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server that has every reply judged by its pool."""
    environment = {
        **BOTH,
        "TURNLOG_WORKERS": str(WORKERS),
        "TURNLOG_INLINE_MAX_BYTES": "0",
        "TURNLOG_WORKER_DEADLINE_S": "1",
    }
    with serving(tmp_path_factory.mktemp("pooled"), engine.base_url, environment=environment) as made:
        yield made


class Client:
    """Takes turns until it is stopped, and asks again where a reply could not be judged."""

    def __init__(self, stand: Stand, stop: threading.Event) -> None:
        self._stand = stand
        self._stop = stop
        self.talks: list[Talk] = []
        self.acknowledged: list[Acknowledged] = []

    def run(self) -> None:
        while not self._stop.is_set():
            talk = self._stand.talk()
            self.talks.append(talk)
            for turn in range(TURNS):
                self._take(talk, turn)

    def _take(self, talk: Talk, turn: int) -> None:
        sent = [*talk.messages, user(f"Question {turn}")]
        key = {"idempotency-key": f"{turn}"}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            response = talk.chat(sent, headers=key, sim={"body_bytes": 300_000})
            if response.status_code == 200:
                break
            assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_crash"), response.text
            assert time.monotonic() < deadline, "never judged"
        self.acknowledged.append(acknowledgement(talk.id, response))
        talk.messages = [*sent, response.json()["choices"][0]["message"]]


def harm(stand: Stand, kind: str, rng: random.Random) -> float:
    """Do it to one child, and wait for its successor; how long that took, in seconds."""
    until(lambda: health(stand)["alive"] == WORKERS, PATIENCE_S)
    crashes = health(stand)["crashes"]
    child = rng.choice(sorted(children(stand.server.pid)))
    began = time.monotonic()
    if kind == "out of memory":
        pages = int(Path(f"/proc/{child}/statm").read_text().split()[0])
        size = pages * resource.getpagesize()
        resource.prlimit(child, resource.RLIMIT_AS, (size, size))
    else:
        os.kill(child, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    until(lambda: health(stand)["crashes"] > crashes, PATIENCE_S)
    until(lambda: health(stand)["alive"] == WORKERS, PATIENCE_S)
    return time.monotonic() - began


def health(stand: Stand) -> dict[str, Any]:
    found: dict[str, Any] = stand.http.get("/health").json()["pool"]
    return found


@pytest.mark.fault(3, "a child of the worker pool is killed, hangs, runs out of memory")
def test_harm_to_the_pool_costs_no_turn(pooled: Stand, tally: Tally) -> None:
    rng = random.Random(3)
    stop = threading.Event()
    clients = [Client(pooled, stop) for _ in range(CLIENTS)]
    runs = [pooled.meanwhile(client.run) for client in clients]
    try:
        for kind in rng.sample(KINDS, len(KINDS)):
            time.sleep(rng.uniform(0, 0.2))
            tally.recovered(harm(pooled, kind, rng))
            tally.tried += 1
    finally:
        stop.set()
    for run in runs:
        run.result(timeout=PATIENCE_S)
    acknowledged = [one for client in clients for one in client.acknowledged]
    committed = sum(len(talk.committed()) for client in clients for talk in client.talks)
    tally.doubled += committed - len(acknowledged)
    verified(pooled, acknowledged, tally)


def test_a_reply_that_two_workers_do_not_manage_is_refused_and_kept(engine: SimulatorProcess, tmp_path: Path) -> None:
    """Megabytes of nested lists take a worker longer than its deadline."""
    slow = {"experts": {"layers": 48, "top_k": 8, "nested": True}, "completion_tokens": 4000}
    environment = {**BOTH, "TURNLOG_WORKER_DEADLINE_S": "0.03"}
    with serving(tmp_path, engine.base_url, environment=environment) as stand:
        talk = stand.talk()
        response = talk.chat([user("Slow")], sim=slow)
        assert error_of(response) == (502, "worker_crash")
        [rejected] = [event for event in talk.events() if event["type"] == "TurnRejected"]
        assert (rejected["reason"], talk.committed()) == ("worker_crash", [])
        kept = stand.http.get(f"{talk.path}/rejected/{rejected['fence']}")
        assert (kept.status_code, len(kept.content)) == (200, rejected["kept_bytes"])
        talk.say("Hello")
        verified(stand)
