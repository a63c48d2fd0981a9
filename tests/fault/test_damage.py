"""A flipped bit, a truncated frame: found by verify and by what needs it; one session fails, the rest goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from helpers.databases import connected
from helpers.looking import change
from integration.places import Place
from integration.routing import BOTH
from integration.stand import WEATHER, Stand, error_of, serving, user
from sqlalchemy import text

from app.composition import metadata
from app.domain.events import CHECK_BYTES
from fault.agents import Agent
from fault.table import Tally
from fault.verified import verified
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url
from workers import codec
from workers.codec import CorruptContent

pytestmark = pytest.mark.long

FOUND = "found, one session fails, the rest exports"
SESSIONS = 8

Row = dict[str, Any]

TALKATIVE: Row = {"completion_tokens": 500, "tool_calls": False, "experts": {"layers": 4, "top_k": 2}}
"""A reply that is stored in two parts, and payloads of some chunks."""

BRIEF: Row = {"completion_tokens": 20, "tool_calls": False}
ENGINE_ERROR: Row = {"fault": "status_503"}

BROKEN_OFF = (200, "")
REFUSED = ((500, "session_unreadable"), BROKEN_OFF)


PLACES = (("turns", "tokens"), ("turns", "exchange"), ("blobs", "data"), ("chunks", "data"), ("events", "data"))
"""Tables and columns that hold bytes."""

LOG = ("turns tokens", "turns exchange", "events data")
"""What every export of a session needs."""


@dataclass(frozen=True)
class Damage:
    """One row's bytes, and what became of them; `key` names the row."""

    url: str
    table: str
    column: str
    key: dict[str, Any]
    before: bytes
    after: bytes

    @property
    def session_id(self) -> str:
        found: str = self.key["session_id"]
        return found

    @property
    def place(self) -> str:
        return f"{self.table} {self.column}"

    @property
    def is_harmless(self) -> bool:
        """Do the bytes still say what they said? A frame has bits that say nothing, an event may lose its checksum."""
        if self.table == "events":
            return self.after == self.before[: -1 - CHECK_BYTES]
        if self.place in LOG:
            return False
        try:
            return codec.decompress(self.after) == codec.decompress(self.before)
        except CorruptContent:
            return False

    def do(self) -> None:
        self._write(self.after)

    def undo(self) -> None:
        self._write(self.before)

    def _write(self, data: bytes) -> None:
        where = " AND ".join(f"{name} = :{name}" for name in self.key)
        statement = f"UPDATE {self.table} SET {self.column} = :content WHERE {where}"
        assert change(self.url, statement, content=data, **self.key) == 1


def choose(url: str, rng: random.Random, place: tuple[str, str]) -> Damage:
    """A row of one of PLACES, and what happens to it."""
    table, column = place
    names = [one.name for one in metadata().tables[table].primary_key.columns]
    row = rng.choice(_rows(url, f"SELECT {', '.join(names)}, {column} FROM {table} WHERE {column} IS NOT NULL"))
    before = bytes(row[-1])
    return Damage(url, table, column, dict(zip(names, row[:-1], strict=True)), before, damaged(before, rng))


def _rows(url: str, query: str) -> list[tuple[Any, ...]]:
    async def read() -> list[tuple[Any, ...]]:
        async with connected(url) as connection:
            found = [tuple(row) for row in await connection.execute(text(query))]
        return sorted(found)

    return asyncio.run(read())


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One bit flipped, or the end cut off."""
    if rng.random() < 0.25:
        return data[: rng.randrange(len(data))]
    return flipped(data, rng.randrange(8 * len(data)))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class Scene:
    """A server with sessions of every kind of content, and what it gives of each while nothing is damaged."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.url = stand.server.environment["TURNLOG_DATABASE_URL"]
        self.agents = [Agent([stand.server.base_url], f"agent{number}", 1) for number in range(SESSIONS)]
        for number, agent in enumerate(self.agents):
            agent.begin(group_id=f"g{number}", metadata={"task": number}, rollback_window=2)
            for turn in range(3):
                sim = TALKATIVE if (number + turn) % 2 else BRIEF
                agent.say(f"Question {turn}", tools=[WEATHER], temperature=0.5, sim=sim)
            agent.reward(number / 10)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()

    def agent(self, session_id: str) -> Agent:
        return next(agent for agent in self.agents if agent.session_id == session_id)

    def other(self, session_id: str, rng: random.Random) -> Agent:
        return rng.choice([agent for agent in self.agents if agent.session_id != session_id])

    def exported(self, **query: str) -> dict[str, list[Row]]:
        """Every session's rows, those that only `explain` gives too, without what depends on when it was asked."""
        found: dict[str, list[Row]] = {agent.session_id: [] for agent in self.agents}
        for row in self.stand.rows(explain="true", replay="true", **query):
            found[row["session_id"]].append({name: field for name, field in row.items() if name != "cursor"})
        return found

    def record(self, agent: Agent) -> tuple[int, str]:
        """Status, and the body or an error's code; damage behind the beginning breaks a reply off."""
        try:
            response = self.stand.http.get(f"/sessions/{agent.session_id}")
        except httpx.RemoteProtocolError:
            return BROKEN_OFF
        return response.status_code, response.text if response.is_success else error_of(response)[1]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def scene(
    request: pytest.FixtureRequest, engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """A server that keeps next to nothing in memory, so that what a request needs is read."""
    postgres = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    place = Place(tmp_path_factory.mktemp("damage"), postgres)
    with serving(place, engine.base_url, environment={**BOTH, "TURNLOG_CACHE_BYTES": "0"}) as stand:
        made = Scene(stand)
        yield made
        made.close()


def problems(scene: Scene) -> set[str]:
    """The sessions in which verify finds something."""
    return {problem.session_id for problem in asyncio.run(verify_url(scene.url)).problems}


def try_one(scene: Scene, rng: random.Random, damage: Damage) -> None:
    """Damage one place, look at everything, and put it back."""
    victim, other = scene.agent(damage.session_id), scene.other(damage.session_id, rng)
    before = {shape: scene.exported(shape=shape) for shape in ("turnlog", "prime-rl")}
    records = {agent.name: scene.record(agent) for agent in (victim, other)}
    damage.do()
    assert problems(scene) == (set() if damage.is_harmless else {victim.session_id})
    for shape, whole in before.items():
        exported_but_for(victim.session_id, damage, whole, scene.exported(shape=shape))
    assert scene.record(other) == records[other.name]
    status, said = scene.record(victim)
    assert (status, said) in (records[victim.name], *REFUSED)
    if damage.table == "events" and not damage.is_harmless:
        assert (status, said) in REFUSED
    heard_right(scene, victim)
    other.say("And on we go", sim=BRIEF)
    damage.undo()


def exported_but_for(victim: str, damage: Damage, before: dict[str, list[Row]], after: dict[str, list[Row]]) -> None:
    """The others' rows are what they were; the victim's are that as well, or say that it cannot be read."""
    for session_id, rows in before.items():
        if session_id != victim:
            assert after[session_id] == rows
    readable = [row for row in after[victim] if "excluded" not in row]
    left_out = [row["excluded"] for row in after[victim] if "excluded" in row]
    assert all(row in before[victim] for row in readable)
    assert all(reason.startswith("unreadable: ") for reason in left_out)
    assert len(readable) + bool(left_out) >= 1, "a row, or the reason why there is none"
    if damage.place in LOG and not damage.is_harmless:
        assert left_out, damage


def heard_right(scene: Scene, agent: Agent) -> None:
    """A turn of the damaged session is refused, or the engine gets the true history; it commits nothing here."""
    assert scene.stand.sim.post("/sim/reset").status_code == 200
    messages = [*agent.messages, user("Still there?")]
    response = scene.stand.http.post(
        f"/sessions/{agent.session_id}/v1/chat/completions",
        json={"model": "simulator", "messages": messages, "sim": ENGINE_ERROR},
    )
    heard = scene.stand.engine_requests(agent.session_id)
    if heard:
        assert response.status_code == 503
        assert [request["body"]["messages"] for request in heard] == [messages]
    else:
        assert error_of(response) == (500, "session_unreadable")


@pytest.mark.fault(11, FOUND)
def test_damage_is_one_sessions_and_is_told(scene: Scene, tally: Tally) -> None:
    rng = random.Random("damage 10")
    for place in PLACES:
        tally.tried += 1
        try_one(scene, rng, choose(scene.url, rng, place))
    acknowledged = [one for agent in scene.agents for one in agent.acknowledged]
    verified(scene.stand, acknowledged, tally)
