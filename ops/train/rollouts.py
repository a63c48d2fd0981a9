"""The server between agents and trainer, from both sides. A peer in Turnlog's place has the methods of these."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ops.train import task
from turnlog import Conflict, EnginesFailed, Turnlog
from turnlog.client.address import default_run

MAX_STALENESS = 4
"""Weight versions. A group with an older token is taken but not trained on."""

CONSUMER = "trainer"
RETRY_FOR_S = 180.0
"""More than a restart of the server takes on a busy machine."""


class RolloutLost(Exception):
    """The server does not have all turns of a rollout that has ended, but `lost` fewer."""

    def __init__(self, turns: int, traces: int) -> None:
        super().__init__(f"{traces} traces of {turns} turns")
        self.lost = turns - traces


class Rollout(msgspec.Struct):
    """An episode under way: the `replies` are the assistant's messages so far."""

    session_id: str
    group: int
    attempt: int
    replies: list[task.Message] = []


class TurnlogSessions:
    """The agents' side."""

    def __init__(self, url: str) -> None:
        self._turnlog = Turnlog(url, retry_for_s=RETRY_FOR_S)

    def progress(self, agent: int) -> tuple[set[tuple[int, int]], list[Rollout]]:
        """Group and attempt of what this agent has ended, and what it had begun and can go on with."""
        ended, unfinished = set(), []
        for session in self._turnlog.sessions(metadata={"agent": agent}):
            place = (int(str(session["group_id"]).removeprefix("task-")), session["attempt"] or 0)
            if session["status"] == "closed":
                ended.add(place)
            elif session["status"] == "open":
                records = self._turnlog.attach(session["session_id"]).get()["records"]
                replies = [record["response"]["choices"][0]["message"] for record in records]
                unfinished.append(Rollout(session["session_id"], *place, replies))
        return ended, unfinished

    def begin(self, agent: int, group: int, attempt: int) -> Rollout:
        session = self._turnlog.create_session(
            group_id=f"task-{group}", attempt=attempt, metadata={"agent": agent}, on_abort="continue"
        )
        return Rollout(session.id, group, attempt)

    def base_url(self, rollout: Rollout) -> str:
        return self._turnlog.attach(rollout.session_id).base_url

    def end(self, rollout: Rollout, reward: float) -> None:
        session = self._turnlog.attach(rollout.session_id)
        session.set_reward(reward)
        session.close()

    def give_up(self, rollout: Rollout) -> None:
        """Its attempt is played again under another id. Nothing of it counts."""
        self._turnlog.attach(rollout.session_id).erase()


class TurnlogGroups:
    """The trainer's side."""

    def __init__(self, url: str) -> None:
        self._turnlog = Turnlog(url, retry_for_s=RETRY_FOR_S)

    def ready(self, size: int, version: int) -> Sequence[Any]:
        """Up to `size` complete groups, the oldest first, those first that were handed out and not `taken`."""
        return self._turnlog.hand_out(CONSUMER, size=size, attempts=task.ATTEMPTS, stale="keep", weight_version=version)

    def taken(self, group_ids: Sequence[str]) -> None:
        """These groups are not handed out again."""
        self._turnlog.acknowledge(CONSUMER, group_ids)

    def pause(self) -> None:
        """No turn passes, and nothing generates, once this returns."""
        try:
            self._turnlog.pause_fleet()
        except EnginesFailed:
            return  # The engine is down and generates nothing. The gate is shut.

    def resume(self, version: str) -> None:
        """Raises no error for an engine that is down: it is resumed when it starts."""
        try:
            self._turnlog.resume_fleet(version=version)
        except EnginesFailed:
            return

    def checkpoint(self, name: str) -> None:
        try:
            self._turnlog.checkpoint(name, drain=True)
        except Conflict as error:
            # Names are not used twice: it was made by a try whose reply was lost.
            if all(
                checkpoint["name"] != name for checkpoint in self._turnlog.checkpoints(run=default_run() or "default")
            ):
                raise error

    def restore(self, name: str) -> None:
        self._turnlog.restore_checkpoint(name)


def write_atomically(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
