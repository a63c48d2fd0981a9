"""Fills a store with 60 sessions in six groups: agents that take turns at a real server, two simulated engines, about
half a minute. Nothing is written into the store by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from app.settings import DEFAULT_FEATURES
from app.store.opening import upgrade
from ops.demo.stories import chats, coding, journeys
from ops.demo.stories.script import Call, Session, Turn, chance
from ops.server import VERBATIM, ServerProcess
from ops.simulator.process import SimulatorProcess

Message = dict[str, Any]

START_S = 12.0
"""Over so long the sessions start, in the order of their attempts."""

UPDATE_S = 11.0
"""When the weights change, in the middle of generations."""

FIRST_WEIGHTS, SECOND_WEIGHTS = "41", "42"
CHARACTERS_PER_S = 2_500
FOREVER_S = 3_600.0
WHEN_CHARACTERS = 300
CONTINUED = "This session is being continued from one that became too long. The summary of it:\n\n"


@dataclass
class FullStore:
    """A running server with the sessions; `waiting` are the turns that do not end."""

    server: ServerProcess
    engines: Sequence[str]
    sessions: list[str] = field(default_factory=list)
    turns: int = 0
    waiting: list[HTTPConnection] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return self.server.base_url


def all_sessions() -> list[Session]:
    """Every session's script, those of one attempt together."""
    groups = [coding.repository(), coding.shell(), chats.retail(), chats.maths(), journeys.research(), journeys.web()]
    return sorted((session for group in groups for session in group), key=lambda session: session.create["attempt"])


@contextlib.contextmanager
def full_store(folder: Path, say: Callable[[str], None] = print, *, port: int = 0) -> Iterator[FullStore]:
    """Start two engines and a server in `folder`, and fill its store. Raises ServerDidNotStart, httpx.HTTPError."""
    options = ("--weight-version", FIRST_WEIGHTS, "--reasoning", "0", "--prefill-us-per-token", "15")
    with SimulatorProcess("--seed", "11", *options) as one, SimulatorProcess("--seed", "12", *options) as other:
        engines = (one.base_url, other.base_url)
        environment = {
            **VERBATIM,
            "TURNLOG_FEATURES": ",".join((*DEFAULT_FEATURES, "search")),
            "TURNLOG_ON_DISCONNECT": "abort_after:0",  # so that the turns that do not end hold up no stop
        }
        server = ServerProcess(folder, upstreams=engines, environment=environment, port=port)
        upgrade(server.environment["TURNLOG_DATABASE_URL"])
        store = FullStore(server, engines)
        server.start()
        try:
            say(f"two simulated engines, Turnlog at {server.base_url}")
            asyncio.run(_fill(store, say))
            yield store
        finally:
            for connection in store.waiting:
                connection.close()
            server.stop()


async def _fill(store: FullStore, say: Callable[[str], None]) -> None:
    sessions = all_sessions()
    limits = httpx.Limits(max_connections=200)
    async with (
        httpx.AsyncClient(base_url=store.base_url, trust_env=False, timeout=120, limits=limits) as http,
        contextlib.AsyncExitStack() as stack,
    ):
        sims = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=120))
            for url in store.engines
        ]
        update = asyncio.create_task(_update_weights(sims, http))
        players = [_Player(store, session, http, sims) for session in sessions]
        async with asyncio.TaskGroup() as group:
            for number, player in enumerate(players):
                group.create_task(player.run(START_S * number / len(players)))
        await update
        for player in players:
            if player.session.hold == "gated":
                await http.post(f"/adapters/{coding.ADAPTER}/pause", json={"lease_s": FOREVER_S})
                await player.hold(Turn("Never said."))
    say(f"{len(store.sessions)} sessions took {store.turns} turns")


async def _update_weights(sims: Sequence[httpx.AsyncClient], http: httpx.AsyncClient) -> None:
    """In place: generations in flight go on with the new weights."""
    await asyncio.sleep(UPDATE_S)
    (await http.post("/checkpoints", json={"name": f"weights-{FIRST_WEIGHTS}"})).raise_for_status()
    for sim in sims:
        body = {"new_version": SECOND_WEIGHTS, "abort_all_requests": False}
        (await sim.post("/update_weight_version", json=body)).raise_for_status()


@dataclass
class _Player:
    """Plays one session's script at the server."""

    store: FullStore
    session: Session
    http: httpx.AsyncClient
    sims: Sequence[httpx.AsyncClient]
    ends: list[tuple[int, Sequence[float]]] = field(default_factory=list)
    lead: _Talk = field(init=False)

    async def run(self, start: float) -> None:
        session = self.session
        await asyncio.sleep(start)
        await self._ask("POST", "/sessions", session.create)
        self.store.sessions.append(session.id)
        rng = chance(session.id)
        lead = self.lead = _Talk(self, rng, [{"role": "system", "content": session.system}])
        await lead.play(session.turns[:1])
        async with asyncio.TaskGroup() as group:
            for agent in session.agents:
                talk = _Talk(self, chance(session.id, agent.name), [{"role": "system", "content": agent.system}])
                talk.agent = agent.name
                group.create_task(talk.play(agent.turns))
        await lead.play(session.turns[1:])
        if session.compacted:
            await lead.compact(journeys.SUMMARY)
            await lead.play(session.compacted)
        await self._finish(rng)
        if session.hold == "running":
            await self.hold(Turn("Never said.", sim={"latency_s": FOREVER_S}))
        elif session.hold == "stuck":
            await self.hold(Turn(fault="never"))

    async def hold(self, turn: Turn) -> None:
        """Send a request whose reply nobody reads."""
        messages = [*self.lead.messages, *self.lead.results]
        await _plan(self.sims, self.session.id, messages[-1]["content"], turn, self.lead.rng)
        connection = HTTPConnection(urlsplit(self.store.base_url).netloc)
        path, body = (f"/sessions/{self.session.id}/v1/chat/completions", json.dumps(self.session.request(messages)))
        connection.request("POST", path, body, {"content-type": "application/json"})
        self.store.waiting.append(connection)

    async def _finish(self, rng: random.Random) -> None:
        """Annotations, reward and the end."""
        session, path = self.session, f"/sessions/{self.session.id}"
        for name, value in session.notes.items():
            await self._ask("PUT", f"{path}/annotations/{name}", {"value": value, "writer": "ann"})
        for turn, value in session.verdicts.items():
            await self._ask("PUT", f"{path}/turns/{turn}/annotations/verdict", {"value": value, "writer": "judge-2"})
        for name in session.columns:
            for turn, logprobs in self.ends:
                values = _column(name, logprobs, session.reward or 0.0, rng)
                body = {"values": values, "over": "output", "dtype": "float32", "writer": "trainer"}
                await self._ask("PUT", f"{path}/turns/{turn}/annotations/{name}", body)
        if session.reward is not None:
            await self._ask("PUT", f"{path}/reward", {"reward": session.reward, "components": session.components})
        if session.closes:
            await self._ask("DELETE", path, None)

    async def _ask(self, method: str, path: str, body: object) -> None:
        (await self.http.request(method, path, json=body)).raise_for_status()


def _column(name: str, logprobs: Sequence[float], reward: float, rng: random.Random) -> list[float]:
    if name == "advantages":
        return [round(reward - 0.6, 3)] * len(logprobs)
    return [min(-1e-4, logprob + rng.gauss(0, 0.4)) for logprob in logprobs]


@dataclass
class _Talk:
    """One agent's history."""

    player: _Player
    rng: random.Random
    messages: list[Message]
    agent: str = ""
    ends: list[int] = field(default_factory=list)
    results: Sequence[Message] = ()

    async def play(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            await self._turn(turn)

    async def compact(self, summary: str) -> None:
        """Have the history summed up, then begin anew with the summary, the last reply and its results."""
        messages, results = list(self.messages), self.results
        await self._turn(Turn(summary, ask="Your context is nearly full. Sum up what you know; text only."))
        system, last = messages[0], messages[-1]
        self.messages = [system, {"role": "user", "content": CONTINUED + summary}, last]
        self.results = results

    async def _turn(self, turn: Turn) -> None:
        if turn.back:
            del self.messages[self.ends[-turn.back] :]
            del self.ends[-turn.back :]
            self.results = ()
        new = [*self.results, *([{"role": "user", "content": turn.ask}] if turn.ask else [])]
        reply = await self._reply([*self.messages, *new], turn)
        if reply is None:
            await asyncio.sleep(0.4)
            return
        self.ends.append(len(self.messages))
        message = reply["choices"][0]["message"]
        self.messages += [*new, message]
        called = message.get("tool_calls") or []
        self.results = [_result(sent, call) for sent, call in zip(called, turn.calls, strict=False)]
        pause = max((call.seconds for call in turn.calls), default=0.3)
        await asyncio.sleep(pause * self.rng.uniform(0.8, 1.25))

    async def _reply(self, messages: Sequence[Message], turn: Turn) -> dict[str, Any] | None:
        """The reply; None if the turn was to fail."""
        session, player = self.player.session, self.player
        await _plan(player.sims, session.id, messages[-1]["content"], turn, self.rng)
        body = {**session.request(messages), **turn.fields, "return_meta_info": True}
        headers = {"x-turnlog-agent-id": self.agent} if self.agent else {}
        response = await player.http.post(f"/sessions/{session.id}/v1/chat/completions", json=body, headers=headers)
        if turn.fault and response.status_code != 200:
            return None
        reply: dict[str, Any] = response.raise_for_status().json()
        player.store.turns += 1
        sampled = reply["choices"][0]["meta_info"]["output_token_logprobs"]
        player.ends.append((int(response.headers["x-turnlog-turn"]), [entry[0] for entry in sampled]))
        return reply


def _result(sent: Mapping[str, Any], call: Call) -> Message:
    return {"role": "tool", "tool_call_id": sent["id"], "content": call.result}


async def _plan(sims: Sequence[httpx.AsyncClient], session_id: str, last: str, turn: Turn, rng: random.Random) -> None:
    """Tell both engines what to answer next to this session where its last message is `last`; it has one of them."""
    sim: dict[str, Any] = {"latency_s": round(rng.uniform(0.7, 1.4) * (0.12 + turn.written / CHARACTERS_PER_S), 3)}
    if turn.text or turn.calls:
        sim |= {"text": turn.text, "reasoning": turn.think or False}
        sim["calls"] = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
    if turn.fault:
        sim["fault"] = turn.fault
    planned = {"when": last[:WHEN_CHARACTERS], "session": session_id, "sim": {**sim, **turn.sim}}
    for engine in sims:
        (await engine.post("/sim/replies", json=planned)).raise_for_status()
