"""A rollout that a trainer asks for by a name: played once, also if the trainer or Turnlog dies meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from turnlog import AsyncSession, AsyncTurnlog
from turnlog.client.address import default_run
from turnlog.errors import Conflict, NotFound

REWARD = {"verl": "reward_score", "skyrl": "rewards"}
"""A row's column with the reward, by shape."""

_LONGEST = 100


def name_of(*parts: object) -> str:
    """A name that can begin a session's id: the parts, and where they do not fit, a hash of them."""
    named = ":".join(map(str, parts))
    if re.fullmatch(rf"[A-Za-z0-9._:-]{{1,{_LONGEST}}}", named):
        return named
    return hashlib.sha256(named.encode()).hexdigest()


async def played(
    turnlog: AsyncTurnlog,
    name: str,
    play: Callable[[AsyncSession], Awaitable[None]],
    *,
    shape: Literal["verl", "skyrl"],
    rewards: Literal["total", "turn"] = "total",
    retry_failed: int = 0,
    **fields: Any,
) -> list[dict[str, Any]]:
    """The rows of the rollout `name`, for which `play` makes its turns and sets its reward, or closes it as failed.

    A session that was rewarded before its process died is not played again: its rows are returned. One that was not is
    closed and left, and another is played. One that failed is returned as well; of the first `retry_failed` that did,
    another is played in its place, as the same attempt. One process at a time may ask for a name. `fields` are those of
    `create_session`, always the same for a name. Its `run`, by default `TURNLOG_RUN`, is a part of the name: two runs
    may play rollouts of one name. An agent may replace its history, because `history` is "tree" unless they say
    otherwise. `rewards` is that of `export`. Raises what `play` raises, and TurnlogError.
    """
    failures = 0
    if (run := fields.get("run") or default_run()) not in (None, "default"):
        name = name_of(run, name)
    for number in itertools.count():
        session_id = f"{name}.{number}"
        try:
            session = await turnlog.create_session(session_id=session_id, **{"history": "tree", **fields})
            is_new = not (await session.get())["records"]
        except (Conflict, NotFound) as error:
            if error.code != "session_closed":
                raise
            session, is_new = turnlog.attach(session_id), False
        if is_new:
            async with session:
                await play(session)
        else:
            await session.close()
        exported = turnlog.export(session_id=session_id, shape=shape, rewards=rewards, evaluation=True)
        rows = [row async for row in exported]
        if any(row[REWARD[shape]] is not None for row in rows):
            return rows
        has_failed = (await session.state())["failed"] is not None
        if (has_failed and failures == retry_failed) or (is_new and not has_failed):
            return rows
        failures += has_failed
    raise AssertionError("unreachable")
