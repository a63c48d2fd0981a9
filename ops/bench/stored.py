"""Full stores for benchmarks: a server plays some sessions, whose rows are then copied under other names."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from app.composition import metadata
from ops.bench.client import Connection
from ops.bench.load import SIM, Conversation, opening_messages, reply_message, timed_turn

QUESTION_BYTES = 512


async def play(
    base_url: str,
    sessions: int,
    turns: int,
    *,
    question_bytes: int = QUESTION_BYTES,
    sim: bytes = SIM,
    ended: bool = False,
) -> list[str]:
    """Take the turns of new sessions, each with another question; returns the sessions' ids. With `ended`, they are
    closed and have a reward. Raises Broken, OSError."""
    names = []
    async with await Connection.connect(base_url) as connection:
        for number in range(sessions):
            names.append((await connection.json("POST", "/sessions"))["session_id"])
            path = f"/sessions/{names[-1]}"
            questions = (opening_messages(question_bytes, seed=number * turns + turn)[0] for turn in range(turns + 1))
            conversation = Conversation([next(questions)], sim)
            for question in questions:
                reply, _ = await timed_turn(connection, f"{path}/v1/chat/completions", conversation.body())
                conversation.answered(reply_message(reply), question)
            if ended:
                await connection.json("PUT", f"{path}/reward", {"reward": float(number % 2)})
                await connection.request("DELETE", path)
    return names


def copy_up_to(path: Path, count: int) -> None:
    """Copy the sessions that were played in an SQLite store until it has `count`; its server has ended.

    A copy has each row of its original in every table of sessions, and a place of its own in the order of events.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.execute(
            "CREATE TEMP TABLE copies AS WITH RECURSIVE counted(copy) AS (SELECT 1 UNION ALL SELECT copy + 1 FROM "
            "counted LIMIT ?1) SELECT session_id AS original, copy FROM counted, sessions LIMIT ?1 - "
            "(SELECT count(*) FROM sessions)",
            (count,),
        )
        (positions,) = connection.execute("SELECT max(position) FROM events").fetchone()
        changed = {"session_id": "session_id || '-' || copy", "position": f"position + copy * {positions}"}
        for table in metadata().sorted_tables:
            if "session_id" in table.primary_key.columns:
                names = [f'"{column.name}"' for column in table.columns]
                values = [changed.get(column.name, f'"{column.name}"') for column in table.columns]
                connection.execute(
                    f"INSERT INTO {table.name} ({', '.join(names)}) SELECT {', '.join(values)} "
                    f"FROM copies JOIN {table.name} ON session_id = original"
                )
        connection.execute("COMMIT")
