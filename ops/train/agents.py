"""Agents: `python -m ops.train.agents --url … --folder … --seed … --agent n`, several rollouts at a time.

They are plain programs on the OpenAI SDK, with tools, and retry what fails. A process that is started again asks the
server what it had begun, and goes on with it. `agent-<n>.jsonl` says what it did, before it goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from ops.engine.process import SERVED_AS
from ops.train import task
from ops.train.peer import GatewaySessions
from ops.train.rollouts import Rollout, RolloutLost, TurnlogSessions, wait_for

AGENTS, PARALLEL = 2, 12
"""Processes, and rollouts that each plays at a time."""

RETRIES = 20
"""The SDK pauses at most 8 s before each: more than the start of an engine."""

POLL_S = 0.05


class Agent:
    """`number`: it plays every `AGENTS`th rollout, from this one on."""

    def __init__(self, sessions: TurnlogSessions | GatewaySessions, folder: Path, seed: int, number: int) -> None:
        self._sessions, self._folder, self._seed, self._number = sessions, folder, seed, number
        self._lock = threading.Lock()
        self._file = (folder / f"agent-{number}.jsonl").open("a")
        # One for all rollouts, with their connections: to make one takes 0.1 s.
        self._openai = OpenAI(base_url="http://unused", api_key="unused", max_retries=RETRIES, timeout=60)

    def run(self) -> None:
        """Plays until it is killed."""
        wait_for(self._folder / "allowed")
        done, unfinished = self._sessions.progress(self._number)
        begun = done | {(rollout.group, rollout.attempt) for rollout in unfinished}
        due, lock = self._due(begun, unfinished), threading.Lock()

        def play_on() -> None:
            while True:
                with lock:
                    group, attempt, rollout = next(due)
                self._play(group, attempt, rollout)

        with ThreadPoolExecutor(PARALLEL) as pool:
            for ended in as_completed([pool.submit(play_on) for _ in range(PARALLEL)]):
                print(ended.exception(), flush=True)
                os._exit(1)  # Its supervisor starts it again, and it goes on.

    def _due(self, begun: set[tuple[int, int]], unfinished: list[Rollout]) -> Iterator[tuple[int, int, Rollout | None]]:
        """First what goes on, then what begins, as far as the trainer allows."""
        for rollout in unfinished:
            yield rollout.group, rollout.attempt, rollout
        number = self._number
        while True:
            group, attempt = divmod(number, task.ATTEMPTS)
            while group >= int((self._folder / "allowed").read_text()):
                time.sleep(POLL_S)
            if (group, attempt) not in begun:
                yield group, attempt, None
            number += AGENTS

    def _play(self, group: int, attempt: int, rollout: Rollout | None) -> None:
        """One rollout to its end. One that cannot go on is given up and played again under another id."""
        while True:
            if rollout is None:
                rollout = self._sessions.begin(self._number, group, attempt)
                self._note({"began": rollout.session_id, "group_id": f"task-{group}", "attempt": attempt})
            try:
                return self._play_to_its_end(rollout)
            except (APIError, RolloutLost) as error:
                why = {"why": type(error).__name__, "error": str(error)}
                lost = error.lost if isinstance(error, RolloutLost) else 0
                self._note({"gave_up": rollout.session_id, **why, "lost": lost})
                self._sessions.give_up(rollout)
                rollout = None

    def _play_to_its_end(self, rollout: Rollout) -> None:
        """Raises openai.APIError where no retry helps."""
        group_task = task.task_of(self._seed, rollout.group)
        client = self._openai.with_options(base_url=self._sessions.base_url(rollout))
        while not isinstance(messages := task.advance(group_task, rollout.replies), float):
            given: Any = messages
            tools: Any = task.TOOLS
            raw = client.chat.completions.with_raw_response.create(
                model=SERVED_AS, messages=given, tools=tools, temperature=1.0, max_tokens=task.MAX_TOKENS
            )
            reply, turn = raw.parse(), raw.headers.get("x-turnlog-turn")
            self._note(
                {
                    "reply": rollout.session_id,
                    "turn": None if turn is None else int(turn),
                    "tokens": reply.usage and reply.usage.completion_tokens,
                    "sha256": hashlib.sha256(raw.content).hexdigest(),
                }
            )
            rollout.replies.append(reply.choices[0].message.model_dump(exclude_none=True))
        self._sessions.end(rollout, messages)
        place = {"group_id": group_task.group_id, "attempt": rollout.attempt, "turns": len(rollout.replies)}
        self._note({"ended": rollout.session_id, "reward": messages, **place})

    def _note(self, fact: dict[str, Any]) -> None:
        """On disk before the agent goes on."""
        with self._lock:
            self._file.write(json.dumps({**fact, "at": time.time()}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--in-memory", action="store_true")
    given = parser.parse_args()
    sessions = GatewaySessions(given.url, given.folder, given.agent) if given.in_memory else TurnlogSessions(given.url)
    Agent(sessions, given.folder, given.seed, given.agent).run()


if __name__ == "__main__":
    main()
