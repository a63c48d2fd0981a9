"""`kill -9` of the server and of the engine in the middle of a long generation: it goes on from what was staged."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.patient import answered
from integration.stand import Stand, Talk, serving, until, user
from integration.tito import output_of, tokenizer_folder

from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

TITLE = "kill -9 in the middle of staged generations"
KILLS, TOKENS, LATENCY_S = 3, 4_000, 8.0
INTERVAL_S = 0.25
PATIENCE_S = 120.0
TOKEN_MARKS = (b'"top_logprobs":', b'"output_ids":')
"""What a stream has once a token: vLLM's, and SGLang's with one in each event."""


class Wire:
    """Stands between the server and an engine, outlives both, and counts the tokens that come through."""

    def __init__(self, engine_port: int) -> None:
        self.tokens = 0
        self._sockets: list[socket.socket] = []
        self._engine_port = engine_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            try:
                engine = socket.create_connection(("127.0.0.1", self._engine_port))
            except OSError:
                client.close()
                continue
            self._sockets.append(engine)
            for source, target, counts in ((client, engine, False), (engine, client, True)):
                threading.Thread(target=self._pass_on, args=(source, target, counts), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        rest = b""
        try:
            while piece := source.recv(1 << 16):
                target.sendall(piece)
                if counts:
                    *lines, rest = (rest + piece).split(b"\n")
                    self.tokens += sum(line.count(mark) for line in lines for mark in TOKEN_MARKS)
        except OSError:
            rest = b""
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Staged:
    """A server, and an engine that is killed and started again at its port."""

    def __init__(self, stand: Stand, engine: SimulatorProcess, wire: Wire) -> None:
        self.stand, self.engine, self.wire = stand, engine, wire

    def ask(self, talk: Talk, latency_s: float = LATENCY_S) -> httpx.Response:
        sim = {"completion_tokens": TOKENS, "latency_s": latency_s, "reasoning": False, "chunk_tokens": 1}
        body = talk.body([user("Go")], temperature=0, max_tokens=TOKENS + 8, sim=sim)
        return answered(self.stand, talk, body, PATIENCE_S)

    def until_generating(self, asked: Future[httpx.Response]) -> None:
        before = self.wire.tokens
        until(lambda: asked.done() or self.wire.tokens > before, PATIENCE_S)


ENGINES = {
    "vllm": ("--dialect", "vllm"),
    "sglang": ("--dialect", "sglang", "--incremental-streaming-output"),
}


@pytest.fixture
def staged(request: pytest.FixtureRequest, dialect: str, store: str, tmp_path: Path) -> Iterator[Staged]:
    engine = SimulatorProcess("--seed", "23", "--reasoning", "0", *ENGINES[dialect])
    wire = Wire(engine.port)
    environment = {
        "TURNLOG_DATABASE_URL": request.getfixturevalue(f"{store}_url"),
        "TURNLOG_UPSTREAM_DIALECT": dialect,
        "TURNLOG_TOKENIZER": str(tokenizer_folder(tmp_path / "tokenizer")) if dialect == "sglang" else "",
        "TURNLOG_STAGE_TOKENS_S": str(INTERVAL_S),
        "TURNLOG_LEASE_S": "1",
    }
    try:
        with engine, serving(tmp_path, wire.url, environment=environment, engine_url=engine.base_url) as stand:
            yield Staged(stand, engine, wire)
    finally:
        wire.close()


def said(response: httpx.Response) -> tuple[Any, ...]:
    """What the engine generated, with the logprobs."""
    [choice] = response.json()["choices"]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    return message, choice["finish_reason"], output_of(response.json()), choice["logprobs"]


@pytest.mark.fault(1, TITLE)
@pytest.mark.parametrize(
    ("killed", "dialect", "store"),
    [
        ("server", "vllm", "sqlite"),
        ("server", "sglang", "postgres"),
        ("engine", "sglang", "sqlite"),
        ("engine", "vllm", "postgres"),
    ],
)
def test_a_generation_outlives_kills(staged: Staged, tally: Tally, killed: str) -> None:
    rng = random.Random(killed)
    stand, wire = staged.stand, staged.wire
    whole = staged.ask(stand.talk(), latency_s=0.0)
    talk = stand.talk()
    wire.tokens = 0
    asked = stand.meanwhile(staged.ask, talk)
    rate, kills = TOKENS / LATENCY_S, 0
    for _ in range(KILLS):
        staged.until_generating(asked)
        time.sleep(rng.uniform(0.1, 1.6) * LATENCY_S / (KILLS + 1))
        if asked.done():
            break
        kills += 1
        process = stand.server if killed == "server" else staged.engine
        process.kill()
        process.start()
    response = asked.result(timeout=PATIENCE_S)
    twice = wire.tokens - TOKENS
    print(f"{killed}: {kills} kills, {TOKENS} tokens, {twice} generated twice, {twice / kills / rate:.3f} s a kill")
    assert said(response) == said(whole)
    assert len(output_of(response.json())) == TOKENS
    assert kills == KILLS
    assert twice < TOKENS / 2
    assert len(talk.committed()) == 1
    parts = talk.committed()[0]["parts"]
    assert [parts[0][1], parts[-1][2]] == [0, TOKENS]
    tally.tried = kills
    verified(stand, [acknowledgement(talk.id, response)], tally)
