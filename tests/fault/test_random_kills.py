"""`kill -9` at random moments under load: what was answered 200 is there for good, to the byte and once."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from helpers.pools import children, gone
from integration.stand import until, user

from app.turn.in_flight import hash_key
from fault.agents import Agents, Insistent
from fault.processes import serving
from fault.table import Tally
from fault.verified import verified
from ops.server import KeptServer, ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

PATIENCE_S = 90.0
KILLS = int(os.environ.get("KILLS", "2"))
TURNS_A_KILL = 15
"""More than so many turns are acknowledged between two kills."""

EXPERTS = {"layers": 48, "top_k": 8, "experts": 128}
STAGING = {"TURNLOG_UPSTREAM_DIALECT": "vllm", "TURNLOG_STAGE_TOKENS_S": "0.1"}


class Client(Insistent):
    """`tokens`: the session's history as a client of token ids knows it, without a question that was not answered."""

    def __init__(self, urls: Sequence[str], name: str, seed: int) -> None:
        super().__init__(urls, name, seed)
        self.tokens: dict[str, list[int]] = {}

    def text(self, sim: Mapping[str, Any], **fields: Any) -> httpx.Response:
        """One turn, now and then in a new session."""
        if not self.messages or self.rng.random() < 0.1:
            self.begin()
        wish = {"tool_calls": False, "reasoning": False, "latency_s": self.rng.uniform(0, 0.15), **sim}
        return self.say(f"Turn {self.requests}", sim=wish, **fields)

    def ids(self, route: str, history: str, key: str, more: Mapping[str, Any]) -> None:
        """One turn of token ids, in a session of its own route."""
        if self.session_id not in self.tokens or self.rng.random() < 0.1:
            self.tokens[self.begin()] = []
        asked = [*self.tokens[self.session_id], *range(20, 31), 31 + self.requests]
        body = {history: asked, key: f"{self.name} {self.requests}", "sim": {"latency_s": 0.05}, **more}
        found = self.take(route, body).json()
        sampled = found["output_ids"] if "output_ids" in found else found["choices"][0]["token_ids"]
        self.tokens[self.session_id] = [*asked, *sampled]

    def told(self, reply: httpx.Response, headers: Mapping[str, str] | None) -> Acknowledged:
        """A stream, and a reply of ids, is made of the engine's; a live stream does not name its turn."""
        if "x-turnlog-turn" not in reply.headers:
            assert headers is not None
            return Acknowledged(self.session_id, 0, None, hash_key(headers["idempotency-key"]))
        told = super().told(reply, headers)
        is_made = self.session_id in self.tokens or reply.headers["content-type"].startswith("text/event-stream")
        return Acknowledged(told.session_id, told.turn) if is_made else told

    def has_its_tokens(self, url: str) -> None:
        for session_id, tokens in self.tokens.items():
            rows = httpx.get(f"{url}/export", params={"session_id": session_id}, timeout=PATIENCE_S).text.splitlines()
            assert [json.loads(row)["tokens"] for row in rows] == [tokens]


class Streaming(Client):
    """Reads live streams. `begun` counts those that were broken off behind their first bytes."""

    begun = 0

    def stream(self) -> None:
        if not self.messages or self.rng.random() < 0.1:
            self.begin()
        asked = [*self.messages, user(f"Turn {self.requests}")]
        sim = {"latency_s": self.rng.uniform(0.1, 0.5), "completion_tokens": 60, "chunk_tokens": 4}
        body = {"messages": asked, "sim": {**sim, "tool_calls": False, "reasoning": False}}
        key = {"idempotency-key": f"{self.name} {self.requests}"}
        more = {"stream": True, "stream_mode": "live"}
        reply = self.take("/v1/chat/completions", {**body, **more}, key)
        events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def _exchange(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """A stream that ends before `[DONE]` is no answer."""
        if not path.endswith("/completions"):
            return super()._exchange(method, path, **fields)
        got = b""
        with self.rng.choice(self._clients).stream(method, path, **fields) as reply:
            try:
                for piece in reply.iter_bytes():
                    got += piece
                if reply.is_success and not got.rstrip().endswith(b"data: [DONE]"):
                    raise httpx.ReadError("the stream was cut")
            except httpx.TransportError:
                self.begun += bool(got)
                raise
        return httpx.Response(reply.status_code, headers=reply.headers, content=got)


def of_ids(client: Client) -> None:
    vllm = ("/inference/v1/generate", "token_ids", "request_id", {"sampling_params": {"max_tokens": 16}})
    sglang = {"sampling_params": {"max_new_tokens": 16}, "return_logprob": True}
    client.ids(*(vllm if int(client.name[5:]) % 2 else ("/generate", "input_ids", "rid", sglang)))


def staged(client: Client) -> None:
    sim = {"completion_tokens": 200, "chunk_tokens": 4, "latency_s": client.rng.uniform(0.3, 1.0)}
    client.text(sim, temperature=0, max_tokens=208)


class Kills(NamedTuple):
    """Kills under clients that take such steps: of the only process on SQLite, or of one of some on PostgreSQL. Of a
    `KeptServer` the supervisor is killed."""

    mode: str
    step: Callable[[Any], object]
    clients: int
    processes: int = 1
    kind: type[Client] = Client
    engine: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    server: type[ServerProcess] = ServerProcess


TABLE = (
    Kills("plain", lambda client: client.text({"completion_tokens": 11}), 10),
    Kills("plain", lambda client: client.text({"completion_tokens": 11}), 10, processes=3),
    Kills(
        *("payloads", lambda client: client.text({"completion_tokens": 120, "experts": EXPERTS}), 6),
        environment={"TURNLOG_REPLAY": "routed_experts"},
    ),
    Kills("tokens", of_ids, 6),
    Kills("mid-stream", Streaming.stream, 8, 1, Streaming, ("--dialect", "vllm"), {"TURNLOG_UPSTREAM_DIALECT": "vllm"}),
    Kills("supervisor", lambda client: client.text({"completion_tokens": 11}), 10, server=KeptServer),
    Kills("staging", staged, 8, engine=("--dialect", "vllm"), environment=STAGING),
)


@pytest.mark.fault(1, "kill -9 at random under load")
@pytest.mark.parametrize(
    "kills",
    [TABLE[0], *(pytest.param(one, marks=pytest.mark.long) for one in TABLE[1:])],
    ids=lambda one: f"{one.mode}-{one.processes}",
)
def test_no_turn_is_lost_or_taken_twice(
    kills: Kills, tally: Tally, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url: str = request.getfixturevalue("postgres_url" if kills.processes > 1 else "sqlite_url")
    with (
        SimulatorProcess("--seed", "3", *kills.engine) as engine,
        serving(tmp_path, kills.processes, url, engine.base_url, kills.environment, kills.server) as processes,
    ):
        with Agents(processes.urls, kills.clients, kills.step, kind=kills.kind) as agents:
            rng = random.Random(3)
            for kill in range(KILLS):
                before = len(agents.acknowledged)
                until(lambda: len(agents.acknowledged) > before + TURNS_A_KILL, PATIENCE_S)  # noqa: B023
                time.sleep(rng.uniform(0, 0.3))
                server = processes.servers[kill % kills.processes]
                serving_pid = server.started[-1] if isinstance(server, KeptServer) else server.pid
                left = [serving_pid, *children(serving_pid)]
                server.kill()
                killed = time.monotonic()
                server.start()
                assert all(gone(pid, 0) for pid in left), "something of the killed server still runs"
                until(lambda: agents.all_served(killed), PATIENCE_S)  # noqa: B023
                tally.tried += 1
                tally.recovered(agents.recovery_s(killed))
            agents.stop()
            assert sum(agent.cut for agent in agents) > 0, "nothing was in flight at any kill"
            assert kills.kind is not Streaming or sum(agent.begun for agent in agents) > 0, "no stream had begun"
            assert not [one for one in agents.answers() if one.code == "session_busy"], "a first retry is served"
            tally.doubled += agents.doubled(processes.urls[0])
            for agent in agents:
                agent.has_its_tokens(processes.urls[0])
        if kills.mode == "staging":
            metrics = httpx.get(f"{processes.urls[0]}/metrics", timeout=PATIENCE_S).text
            assert re.search(r"turnlog_turns_staged_total\{[^}]*\} [1-9]", metrics)
        verified(url, agents.acknowledged, tally)
    verified(url)
