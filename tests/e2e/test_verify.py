"""`ops.verify` finds nothing in a sound store, and every damage that is done to one."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ops.bench.startup import fill
from ops.server import ServerProcess
from ops.verify import verify_url

DAMAGE = {
    "a gap in the log": "DELETE FROM events WHERE session_id = 'filled-1' AND seq = 4",
    "a head that lags": "UPDATE sessions SET version = 3 WHERE session_id = 'filled-1'",
    "a miscounted head": "UPDATE sessions SET turns = 9 WHERE session_id = 'filled-0'",
    "a claim that the log does not know": ("INSERT INTO open_turns SELECT 'filled-0', 99, 6, 5, 1, 'x', NULL, 0"),
    "a turn without content": "DELETE FROM turns WHERE session_id = 'filled-0' AND turn = 3",
    "a damaged frame": "UPDATE turns SET facts = x'00' WHERE session_id = 'filled-0' AND turn = 2",
    "a missing blob": "DELETE FROM blobs WHERE session_id = 'filled-2'",
    "a damaged blob": "UPDATE blobs SET data = x'00'",
    "a log without a head": "DELETE FROM sessions WHERE session_id = 'filled-2'",
    "an unreadable event": "UPDATE events SET data = x'7b7d' WHERE session_id = 'filled-2' AND seq = 5",
    "content of nobody": (
        "INSERT INTO turns SELECT 'orphan', turn, parent_turn, segment, choice_index, protocol, facts, wire "
        "FROM turns WHERE session_id = 'filled-0'"
    ),
    "another turn's content": (
        "UPDATE turns SET wire = (SELECT wire FROM turns other "
        "WHERE other.session_id = turns.session_id AND other.turn = 1) WHERE turn = 2"
    ),
    "a fence that goes back": (
        "UPDATE events SET data = replace(CAST(data AS TEXT), '\"fence\":6', '\"fence\":4') "
        "WHERE session_id = 'filled-2'"
    ),
    "a reward that was never assigned": "UPDATE sessions SET reward = 1.0 WHERE session_id = 'filled-2'",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    server = ServerProcess(folder).migrate()
    asyncio.run(fill(server.environment["TURNLOG_DATABASE_URL"], 3, 5))
    return server.database_path


def problems_of(path: Path) -> list[str]:
    return list(asyncio.run(verify_url(f"sqlite+aiosqlite:///{path}")).problems)


def test_a_sound_store_has_no_problem(sound: Path) -> None:
    assert problems_of(sound) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(sound: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "damaged.db"
    shutil.copy(sound, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(DAMAGE[damage])
    assert problems_of(path)
