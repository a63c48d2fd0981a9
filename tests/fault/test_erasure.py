"""What an erasure promises: nothing of the content is in any file afterwards, and nothing brings it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.routing import BOTH, KINDS
from integration.stand import Stand, Talk, serving, user
from sqlalchemy import select, text

from app.store.database import create_engine
from app.store.schema import blobs, chunks, refused_replies, snapshots, turns
from fault.verified import verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

CANARY = "canary-5f0e1d"
SMALL = {"experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1}, "completion_tokens": 8}
LARGE = {**SMALL, "completion_tokens": 900}
"""A payload of more than a MiB that does not compress: its chunks are staged before the commit."""

COMPONENT = 0.31337421337
"""A component's value, which no other number in the files is."""

NOTE = "note-of-5f0e1d"
TAG = "tag-of-5f0e1d"

GRADED = (CANARY.encode(), repr(COMPONENT).encode(), NOTE.encode(), TAG.encode())
"""By what a client's text is known in the log, which is not compressed: a reward's components, a note, a tag."""

VACUUM = [
    f"VACUUM (FULL, ANALYZE) {table}"
    for table in ("events", "sessions", "turns", "blobs", "chunks", "refused_replies", "staged_tokens", "snapshots")
]
"""As docs/operations.md says it."""


PIECE = 24
STEP = 1 << 18
COLUMNS = (turns.c.tokens, turns.c.exchange, blobs.c.data, chunks.c.data, refused_replies.c.data, snapshots.c.data)


@pytest.fixture
def alone(engine: SimulatorProcess, tmp_path: Path) -> Iterator[Stand]:
    """A server over a file of the test's own."""
    with serving(tmp_path, engine.base_url, environment=BOTH) as made:
        yield made


def frames(url: str, session_id: str | None = None) -> set[bytes]:
    """The stored bytes of a session's content, or of everybody's."""

    async def read() -> set[bytes]:
        found: set[bytes] = set()
        made = create_engine(url)
        try:
            async with made.connect() as connection:
                for column in COLUMNS:
                    query = select(column).where(column.is_not(None))
                    if session_id is not None:
                        query = query.where(column.table.c.session_id == session_id)
                    found |= set((await connection.execute(query)).scalars())
        finally:
            await made.dispose()
        return found

    return asyncio.run(read())


def pieces(found: Iterable[bytes], others: Iterable[bytes] = ()) -> set[bytes]:
    """Bytes of each frame by which it is known, in several places; none that frames of others have too."""
    known = b"\0".join(others)
    places = ((frame, at) for frame in found for at in {*range(0, len(frame) - PIECE, STEP), len(frame) - PIECE})
    cut = {frame[at : at + PIECE] for frame, at in places if at >= 0}
    return {piece for piece in cut if piece not in known}


def left_in(files: Iterable[Path], wanted: Iterable[bytes]) -> list[tuple[str, bytes]]:
    """Which of these bytes are in which file."""
    found: list[tuple[str, bytes]] = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            whole = file.read_bytes()
            found += [(file.name, piece) for piece in wanted if piece in whole]
    return found


def files_of(stand: Stand) -> list[Path]:
    return [file for file in stand.server.database_path.parent.iterdir() if file.is_file()]


def url_of(stand: Stand) -> str:
    return stand.server.environment["TURNLOG_DATABASE_URL"]


def a_rich_session(stand: Stand) -> Talk:
    """With metadata, tools, payloads, a turn that was rolled back, a refused reply, a key, rewards."""
    talk = stand.talk(metadata={"owner": CANARY}, rollback_window=1)
    tool = {"type": "function", "function": {"name": "look", "description": CANARY, "parameters": {}}}
    talk.say(f"Keep this: {CANARY}", tools=[tool], headers={"idempotency-key": f"key-{CANARY}"}, sim=SMALL)
    talk.say(f"To be discarded: {CANARY}", sim=SMALL)
    talk.messages = talk.messages[:2]
    talk.say(f"Instead: {CANARY}", sim=LARGE)
    refused = talk.chat([*talk.messages, user(CANARY)], sim={"fault": "bad_experts_base64"})
    assert refused.status_code == 502
    grade(stand, talk)
    return talk


def grade(stand: Stand, talk: Talk) -> None:
    """Rewards of the session and of a turn, each with components."""
    components = {f"style-{CANARY}": COMPONENT}
    for given in ({"reward": 0.25}, {"reward": 0.75, "turn": 1}, {"reward": 0.5, "turn": 3}, {"reward": 0.5}):
        body = {**given, "components": components}
        assert stand.http.put(f"{talk.path}/reward", json=body).status_code == 200
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1.0, "turn": 2}).status_code == 200
    talk.noted(note=f"A {NOTE}", tags=[TAG, "b"])


def rewards(talk: Talk) -> list[dict[str, Any]]:
    return [event for event in talk.events() if event["type"] == "RewardAssigned"]


def erase(stand: Stand, session_id: str) -> httpx.Response:
    return stand.http.delete(f"/sessions/{session_id}", params={"erase": "true"})


@pytest.mark.threat("erased content still readable")
def test_nothing_of_an_erased_session_is_in_any_file(alone: Stand) -> None:
    other = alone.talk()
    other.say("Hello")
    talk = a_rich_session(alone)
    alone.server.stop()
    alone.server.environment["TURNLOG_CRASH_POINT"] = "after_staged"
    alone.server.start()
    with pytest.raises(httpx.TransportError):
        talk.chat([*talk.messages, user("Never committed")], sim=LARGE)
    alone.server.kill()
    del alone.server.environment["TURNLOG_CRASH_POINT"]
    before = frames(url_of(alone), talk.id)
    wanted = pieces(before, frames(url_of(alone), other.id))
    assert len(wanted) > 10
    assert {piece for _, piece in left_in(files_of(alone), wanted)} == wanted
    alone.server.start()
    talk.say("On", sim=LARGE)
    wanted |= pieces(frames(url_of(alone), talk.id) - before, frames(url_of(alone), other.id))
    other.say("Hello again")
    assert alone.http.delete(talk.path).status_code == 204
    grade(alone, talk)
    assert {piece for _, piece in left_in(files_of(alone), GRADED)} == set(GRADED)
    before_erasure = rewards(talk)
    assert erase(alone, talk.id).status_code == 204
    assert left_in(files_of(alone), {*wanted, *GRADED}) == []
    assert talk.types()[-1] == "SessionErased"
    assert rewards(talk) == [without_components(event) for event in before_erasure]
    other.say("And again")
    verified(alone)


def without_components(event: dict[str, Any]) -> dict[str, Any]:
    """What an erasure leaves of a reward's event; one that had no components stays as it was."""
    left = {name: value for name, value in event.items() if name != "components"}
    return {**left, "components_erased": True} if left != event else event


def test_an_erasure_that_was_killed_is_finished_by_the_next_start(alone: Stand) -> None:
    """The janitor's are asked for by nobody a second time."""
    talk = a_rich_session(alone)
    wanted = pieces(frames(url_of(alone), talk.id))
    alone.server.stop()
    alone.server.environment["TURNLOG_CRASH_POINT"] = "after_erase"
    alone.server.start()
    with pytest.raises(httpx.TransportError):
        erase(alone, talk.id)
    alone.server.kill()
    assert left_in(files_of(alone), wanted)
    del alone.server.environment["TURNLOG_CRASH_POINT"]
    alone.server.start()
    assert left_in(files_of(alone), {*wanted, *GRADED}) == []


def test_on_postgresql_a_full_vacuum_takes_the_traces_out(
    engine: SimulatorProcess, tmp_path: Path, postgres_url: str
) -> None:
    environment = {**BOTH, "TURNLOG_DATABASE_URL": postgres_url}
    with serving(tmp_path, engine.base_url, environment=environment) as stand:
        talk, other = a_rich_session(stand), stand.talk()
        other.say("Hello")
        # A large value is cut every 2000 bytes or so: a piece across a cut is in no file as it is.
        whole = pieces(frames(postgres_url, talk.id), frames(postgres_url, other.id))
        wanted = {piece for _, piece in left_in(_tables(postgres_url), whole)}
        assert len(wanted) > 10
        assert stand.http.delete(talk.path).status_code == 204
        grade(stand, talk)
        assert {piece for _, piece in left_in(_tables(postgres_url), GRADED)} == set(GRADED)
        # What the planner wants to know of a table must not be its content.
        _in_autocommit(postgres_url, "ANALYZE")
        before = rewards(talk)
        assert erase(stand, talk.id).status_code == 204
        assert rewards(talk) == [without_components(event) for event in before]
        assert left_in(_tables(postgres_url), wanted), "a deleted row's bytes stay in its page"
        _in_autocommit(postgres_url, *VACUUM, "CHECKPOINT", "SELECT pg_switch_wal()", "CHECKPOINT")
        assert left_in(_tables(postgres_url), {*wanted, *GRADED}) == []
        other.say("On")
        verified(stand)
        assert {kind for kind in KINDS if kind in other.rows(replay="true")[0]}


def _in_autocommit(url: str, *statements: str) -> None:
    async def work() -> None:
        made = create_engine(url)
        try:
            async with made.connect() as connection:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                for statement in statements:
                    await connection.execute(text(statement))
        finally:
            await made.dispose()

    asyncio.run(work())


def _tables(url: str) -> list[Path]:
    """The files of the database, with everything in them that is in the server's memory."""

    async def ask() -> tuple[str, int]:
        made = create_engine(url)
        try:
            async with made.connect() as connection:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                await connection.execute(text("CHECKPOINT"))
                folder = (await connection.execute(text("SHOW data_directory"))).scalar_one()
                oid = text("SELECT oid FROM pg_database WHERE datname = current_database()")
                return folder, (await connection.execute(oid)).scalar_one()
        finally:
            await made.dispose()

    folder, oid = asyncio.run(ask())
    return [file for file in (Path(folder) / "base" / str(oid)).iterdir() if file.is_file()]
