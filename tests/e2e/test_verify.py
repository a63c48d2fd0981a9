"""`ops.verify` finds nothing in a sound store, and every damage that is done to one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.databases import run_module
from integration.routing import BOTH
from integration.stand import Talk, standing, user

from app.domain.events import AffinityBound, Event, SessionClosed, TurnCommitted, decode, encode, name_of
from app.domain.fleet import FleetPaused, FleetResumed
from app.store.database import Database
from app.store.dialect import StorePoints
from ops.verify import Acknowledged, Report, verify, verify_url


def fleet_event(seq: int, event: Event, key: str = "fleet") -> str:
    """The statement that puts an event into the fleet's log."""
    return f"INSERT INTO fleet_events VALUES ({seq}, '{key}', '{name_of(event)}', 1, 1.0, x'{encode(event).hex()}')"


def affinity(state: str, session_id: str, *, worker_session: bool) -> str:
    return (
        "INSERT INTO affinities VALUES "
        f"('agent-7', 'http://engine', '{state}', {worker_session:d}, 300.0, 1e12, 1, '{session_id}')"
    )


DAMAGE = {
    "a gap in the log": ("DELETE FROM events WHERE session_id = 'filled-1' AND seq = 4", "does not follow"),
    "a head that lags": ("UPDATE sessions SET version = 3 WHERE session_id = 'filled-1'", "sessions.version is 3"),
    "a miscounted head": ("UPDATE sessions SET turns = 9 WHERE session_id = 'filled-0'", "sessions.turns is 9"),
    "a claim that the log does not know": (
        "INSERT INTO open_turns SELECT 'filled-0', 99, 6, 5, 1, 'x', NULL, 0, NULL, NULL",
        "open_turns[99]",
    ),
    "a turn without content": ("DELETE FROM turns WHERE session_id = 'filled-0' AND turn = 3", "4 turns are stored"),
    "a damaged frame": (
        "UPDATE turns SET tokens = x'00' WHERE session_id = 'filled-0' AND turn = 2",
        "the content's hash differs from the log's",
    ),
    "a missing blob": ("DELETE FROM blobs WHERE session_id = 'filled-2'", "blobs [] are stored"),
    "a damaged blob": ("UPDATE blobs SET data = x'00' WHERE session_id = 'filled-2'", "blob 0: "),
    "a missing image": ("DELETE FROM blobs WHERE kind = 'image'", "blobs [0] are stored"),
    "a changed image": (
        "UPDATE blobs SET data = (SELECT data FROM blobs WHERE kind = 'params' LIMIT 1) WHERE kind = 'image'",
        "differs from the log",
    ),
    "a log without a head": ("DELETE FROM sessions WHERE session_id = 'filled-2'", "sessions is nothing"),
    "an unreadable event": (
        "UPDATE events SET data = x'7b7d' WHERE session_id = 'filled-2' AND seq = 5",
        "the log cannot be read",
    ),
    "content of nobody": (
        "INSERT INTO turns SELECT 'orphan', turn, parent_turn, segment, choice_index, protocol, tokens, exchange, "
        "written_at, absorbed FROM turns WHERE session_id = 'filled-0'",
        "rows without a log",
    ),
    "a snapshot of nobody": ("INSERT INTO snapshots VALUES ('orphan', 1, 'session', x'00')", "rows without a log"),
    "another turn's content": (
        "UPDATE turns SET exchange = (SELECT exchange FROM turns other "
        "WHERE other.session_id = turns.session_id AND other.turn = 1) WHERE turn = 2 AND session_id = 'filled-0'",
        "the content's hash differs from the log's",
    ),
    "a reward that was never assigned": (
        "UPDATE sessions SET reward = 1.0 WHERE session_id = 'filled-2'",
        "sessions.reward is 1.0",
    ),
    "two events in one place": (
        "UPDATE events SET position = 3 WHERE session_id = 'filled-1' AND seq = 2",
        "two events are at transaction 0, position 3",
    ),
    "events out of order": (
        "UPDATE events SET position = 1000000 WHERE session_id = 'filled-1' AND seq = 2",
        "event 3 comes before an earlier one",
    ),
    "a chunk of no turn": (
        "INSERT INTO chunks SELECT session_id, 77, number, kind, size, hash, NULL, NULL, data FROM chunks "
        "WHERE session_id = 'rich' AND data IS NOT NULL LIMIT 1",
        "belong to no turn",
    ),
    "a chunk cut short": (
        "UPDATE chunks SET data = substr(data, 1, 20) WHERE session_id = 'rich' AND data IS NOT NULL",
        "chunk (",
    ),
    "a refused reply of no turn": (
        "UPDATE refused_replies SET fence = 77 WHERE session_id = 'rich'",
        "rejected replies [77] belong to no rejected turn",
    ),
    "a group that lost its row": ("DELETE FROM groups WHERE group_id = 'done'", "it has no row, and none is pending"),
    "a miscounted group": ("UPDATE groups SET sessions = 7 WHERE group_id = 'done'", "stored are 7 sessions"),
    "a group that is not complete": (
        "UPDATE groups SET completed_at = 1.0 WHERE group_id = 'going-on'",
        "group going-on is incomplete",
    ),
    "a group's wrong age": (
        "UPDATE groups SET measured = 1, oldest_version = 5 WHERE group_id = 'done'",
        "its oldest weight version is",
    ),
    "another engine than the session's": (
        f"UPDATE events SET data = x'{encode(AffinityBound('http://elsewhere')).hex()}' "
        "WHERE session_id = 'rich' AND type = 'AffinityBound'",
        "came from an engine that was not its session's",
    ),
    "a gap in the fleet's log": (fleet_event(2, FleetPaused(1, 2.0)), "event 2 of the fleet: follows event 0"),
    "an unreadable event of the fleet": (
        "INSERT INTO fleet_events VALUES (1, 'fleet', 'FleetPaused', 1, 1.0, x'7b7d')",
        "event 1 of the fleet: cannot be read",
    ),
    "a session's event in the fleet's log": (fleet_event(1, SessionClosed()), "is an event of a session"),
    "an event of the fleet under another key": (
        fleet_event(1, FleetPaused(1, 2.0), "adapter:a"),
        "is about fleet, its row says adapter:a",
    ),
    "closings that were lost": (fleet_event(1, FleetResumed(2)), "counts 2 closings after 0"),
    "an affinity in no state": (
        affinity("lost", "rich", worker_session=True),
        "is lost, which is not a state of an affinity",
    ),
    "an affinity that nobody can end": (
        affinity("closing", "rich", worker_session=False),
        "is closing, but no engine has a session of it",
    ),
    "an affinity of nobody": (
        affinity("bound", "orphan", worker_session=False),
        "belongs to a session that does not exist",
    ),
}


class Made:
    """A store that a real server wrote, and what its clients were answered. `noted`: before the feed was asked, which
    brings what is stored of a group up to date."""

    def __init__(self, path: Path, held: list[Acknowledged], noted: Report) -> None:
        self.path = path
        self.held = held
        self.noted = noted


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """With a session of payloads, a refused reply and a rollback, one that was erased, and two groups."""
    environment = {**BOTH, "TURNLOG_CLIENT_REPLY": "verbatim", "TURNLOG_CLOSED_REPLAY_TTL_S": "off"}
    with standing(tmp_path_factory.mktemp("verify"), "--seed", "5", environment=environment) as stand:
        held: list[Acknowledged] = []

        def say(talk: Talk, text: str, **fields: Any) -> None:
            body = talk.say(text, **fields).content
            held.append(Acknowledged(talk.id, len(talk.committed()), hashlib.sha256(body).hexdigest()))

        rich = stand.talk(session_id="rich", group_id="going-on")
        for number in range(4):
            say(rich, f"Question {number}")
        rich.messages = rich.messages[:-2]
        say(rich, "Instead")
        assert rich.chat([*rich.messages, user("Bad")], sim={"fault": "bad_experts_base64"}).status_code == 502
        erased = stand.talk(session_id="erased")
        say(erased, "Hello")
        assert stand.http.delete(erased.path, params={"erase": "true"}).status_code == 204
        done = stand.talk(session_id="done", group_id="done")
        done.add({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,PNG"}}]})
        stand.http.put(f"{done.path}/reward", json={"reward": 1.0})
        stand.http.delete(done.path)
        for name in ("filled-0", "filled-1", "filled-2"):
            filled = stand.talk(session_id=name)
            for number in range(5):
                say(filled, f"Question {number}")
        path = stand.server.database_path
        noted = report_of(path)
        # A request to the feed brings groups up to date.
        assert stand.http.get("/export/groups", params={"consumer": "trainer", "size": 1}).status_code == 200
        stand.server.stop()
        return Made(path, held, noted)


def report_of(path: Path, held: list[Acknowledged] | None = None) -> Report:
    async def check() -> Report:
        database = Database(f"sqlite+aiosqlite:///{path}", points=StorePoints())
        try:
            return await verify(database, held or [])
        finally:
            await database.close()

    return asyncio.run(check())


def test_a_sound_store_has_no_problem(sound: Made) -> None:
    report = asyncio.run(verify_url(f"sqlite+aiosqlite:///{sound.path}"))
    assert report.problems == []
    assert (report.sessions, report.groups, report.noted_groups) == (6, 2, 0)
    assert (sound.noted.problems, sound.noted.groups, sound.noted.noted_groups) == ([], 2, 2)
    assert sound.noted.summary().endswith(" 2 groups (2 not compared: they have just changed): 0 problems")


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(sound: Made, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "damaged.db"
    shutil.copy(sound.path, path)
    statement, said = DAMAGE[damage]
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement).rowcount > 0
    problems = report_of(path).problems
    assert [one for one in problems if said in one.what], problems


def test_a_fence_that_goes_back_is_found(sound: Made, tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    shutil.copy(sound.path, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        query = "SELECT seq, version, data FROM events WHERE session_id = 'filled-2' AND type = 'TurnCommitted'"
        seq, version, data = connection.execute(f"{query} ORDER BY seq").fetchall()[2]
        event = decode("TurnCommitted", version, data)
        assert isinstance(event, TurnCommitted)
        changed = encode(msgspec.structs.replace(event, fence=event.fence - 2))
        connection.execute("UPDATE events SET data = ? WHERE session_id = 'filled-2' AND seq = ?", (changed, seq))
    assert [one for one in report_of(path).problems if "not open" in one.what]


def test_a_groups_age_that_cannot_be_checked_is_told(sound: Made, tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    shutil.copy(sound.path, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE groups SET measured = 1 WHERE group_id = 'done'")
        of_turns = "session_id = 'done' AND type = 'TurnCommitted'"
        assert connection.execute(f"UPDATE events SET data = x'7b7d' WHERE {of_turns}").rowcount == 1
    assert [one for one in report_of(path).problems if "done: its oldest weight version was not checked" in one.what]


def test_acknowledged_turns_are_there_with_the_replies_that_were_given(sound: Made) -> None:
    report = report_of(sound.path, sound.held)
    assert (report.problems, report.missing) == ([], [])
    # Payloads of turns behind the window are tombstoned, and `erased` has no content.
    assert report.not_compared == 3 + 1 + 3 * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: msgspec.structs.replace(one, turn=99), "but is not in the log"),
        (lambda one: msgspec.structs.replace(one, session_id="never"), "but is not in the log"),
        (lambda one: msgspec.structs.replace(one, reply_sha256="0" * 64), "with another reply"),
    ],
)
def test_an_acknowledged_turn_that_is_missing_is_found(
    sound: Made, change: Callable[[Acknowledged], Acknowledged], said: str
) -> None:
    last = [one for one in sound.held if one.session_id == "rich"][-1]
    wrong = change(last)
    report = report_of(sound.path, [last, wrong])
    assert report.missing == [wrong]
    assert [one.what for one in report.problems] == [f"turn {wrong.turn} was acknowledged, {said}"]


def test_the_command_says_what_is_wrong_and_how_it_ended(sound: Made, tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    shutil.copy(sound.path, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM sessions WHERE session_id = 'filled-2'")
    outcomes = {}
    for name in (str(sound.path), str(path), str(tmp_path / "none.db")):
        url = f"sqlite+aiosqlite:///{name}"
        # A mistake in a setting that has nothing to do with the store is not in the way.
        environment = {**os.environ, "TURNLOG_WORKERS": "many"}
        outcomes[name] = run_module("turnlog.cli", "verify", "--database-url", url, environment=environment)
    assert [one.returncode for one in outcomes.values()] == [0, 1, 2]
    sound_one, damaged, none = outcomes.values()
    assert sound_one.stdout.endswith("2 groups: 0 problems\n")
    assert damaged.stdout.startswith("filled-2: sessions is nothing, the log says")
    assert none.stderr == f"verify: the database {tmp_path / 'none.db'} does not exist\n"
    assert not (tmp_path / "none.db").exists()
