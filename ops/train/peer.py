"""A session server that keeps its sessions in memory, in Turnlog's place: rllm-model-gateway 0.1.0.

What was chosen, where its documentation and the framework that it comes from (rllm) leave a choice:

- It runs as published, with its own memory store. A trace is stored before its reply leaves
  (`sync_traces`), so that an agent never ends before its traces are there.
- Agents reach it through the OpenAI SDK with the retries that they have at Turnlog, and wait as long
  for its other routes. It forwards a retry to the engine like any request, so agents outlive its
  restarts as far as the retries go.
- A rollout's traces are read when it ends, and matched to its turns by position, as rllm does. Where
  fewer are there than turns, the rollout has failed and its attempt is played again under a new
  session. What was read is kept on disk (`rows-<n>.jsonl`), so a kill of the trainer loses none of it;
  rllm keeps it in the trainer's memory.
- A trace becomes a row of its own, prompt and completion. Advantages are Turnlog's formula.
- A killed agent's rollouts begin anew: the gateway has no way to go on with a session.
- The trainer updates the engine directly, behind vLLM's own pause (`mode=wait`): what runs ends
  first, so nothing is cut. Traces name no weight version; that of a rollout's beginning counts.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from ops.train import task
from ops.train.rollouts import RETRY_FOR_S, Rollout, RolloutLost, lines

PAUSE_S = 0.2
"""Between two tries of a route that does not answer."""

JsonObject = dict[str, Any]


class GatewaySessions:
    """The agents' side. `folder` is the run's."""

    def __init__(self, url: str, folder: Path, agent: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._url = url
        self._newest = folder / "weights" / "newest"
        self._file = folder / f"rows-{agent}.jsonl"
        self._notes = folder / f"agent-{agent}.jsonl"
        self._begun_at: dict[str, int] = {}

    def close(self) -> None:
        self._http.close()

    def progress(self, agent: int) -> tuple[set[tuple[int, int]], list[Rollout]]:
        """Group and attempt of what was read from the gateway. Nothing goes on."""
        rows = lines(self._file)
        ended = {line["session_id"] for line in rows}
        notes = lines(self._notes)
        over = ended | {note["gave_up"] for note in notes if "gave_up" in note}
        killed = [note["began"] for note in notes if note.get("began", None) not in {None, *over}]
        with self._notes.open("a") as file:
            for session_id in killed:
                note = {"gave_up": session_id, "why": "killed", "at": time.time()}
                file.write(json.dumps(note) + "\n")
        return {(line["group"], line["attempt"]) for line in rows}, []

    def begin(self, agent: int, group: int, attempt: int) -> Rollout:
        session_id = uuid.uuid4().hex
        self._begun_at[session_id] = int(self._newest.readlink().name)
        self._insist("POST", "/sessions", json={"session_id": session_id})
        return Rollout(session_id, group, attempt)

    def base_url(self, rollout: Rollout) -> str:
        return f"{self._url}/sessions/{rollout.session_id}/v1"

    def end(self, rollout: Rollout, reward: float) -> None:
        """Read the rollout's traces. Raises RolloutLost where they are not those of its turns."""
        path = f"/sessions/{rollout.session_id}"
        traces = [
            trace
            for trace in self._insist("GET", f"{path}/traces").json()
            if trace["prompt_token_ids"] and trace["completion_token_ids"]
        ]
        if len(traces) != len(rollout.replies):
            raise RolloutLost(len(rollout.replies), len(traces))
        line = {
            "session_id": rollout.session_id,
            "group": rollout.group,
            "attempt": rollout.attempt,
            "reward": reward,
            "version": self._begun_at.pop(rollout.session_id),
            "traces": [
                {name: trace[name] for name in ("prompt_token_ids", "completion_token_ids", "logprobs")}
                for trace in traces
            ],
        }
        text = json.dumps(line) + "\n"
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._insist("DELETE", path)

    def give_up(self, rollout: Rollout) -> None:
        self._insist("DELETE", f"/sessions/{rollout.session_id}")

    def _insist(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """Ask until there is an answer, as long as Turnlog's client does. Raises httpx.HTTPError."""
        deadline = time.monotonic() + RETRY_FOR_S
        while True:
            try:
                return self._http.request(method, path, **fields).raise_for_status()
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_S)


class GatewayGroups:
    """The trainer's side: groups whose every attempt was read, in the order of their numbers."""

    def __init__(self, engine: str, folder: Path) -> None:
        self._engine = httpx.Client(base_url=engine, timeout=120, trust_env=False)
        self._folder = folder

    def close(self) -> None:
        self._engine.close()

    def ready(self, size: int, version: int) -> Sequence[JsonObject]:
        """Up to `size` complete groups that are in no step of the history that survives."""
        taken = {
            name
            for step in lines(self._folder / "steps.jsonl")
            for name in [*step["groups"], *(group["group_id"] for group in step["left"])]
        }
        complete = (
            (number, attempts)
            for number, attempts in sorted(read_groups(self._folder).items())
            if len(attempts) >= task.ATTEMPTS and f"task-{number}" not in taken
        )
        return [group_of(number, attempts, version) for number, attempts in complete][:size]

    def taken(self, group_ids: Sequence[str]) -> None:
        """The step's line says so."""

    def pause(self) -> None:
        self._tell("/pause?mode=wait")

    def resume(self, version: str) -> None:
        self._tell("/resume")

    def _tell(self, path: str) -> None:
        try:
            self._engine.post(path).raise_for_status()
        except httpx.HTTPError:
            return  # The engine is down, and paused nothing: it starts with the newest weights.

    def checkpoint(self, name: str) -> None:
        """The gateway has nothing that could be kept."""

    def restore(self, name: str) -> None:
        """The trainer's own checkpoint is all that there is."""


def read_groups(folder: Path) -> dict[int, dict[int, JsonObject]]:
    """What agents read of the gateway: by group and attempt a line of `rows-<n>.jsonl`."""
    groups: dict[int, dict[int, JsonObject]] = defaultdict(dict)
    for file in sorted(folder.glob("rows-*.jsonl")):
        for line in lines(file):
            groups[line["group"]][line["attempt"]] = line
    return groups


def group_of(number: int, attempts: Mapping[int, JsonObject], version: int) -> JsonObject:
    """A group with rows, named as Turnlog's feed names them."""
    ended = [attempts[attempt] for attempt in sorted(attempts)]
    rewards = [line["reward"] for line in ended]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    group_id = f"task-{number}"
    return {
        "group_id": group_id,
        "attempts": [{"session_id": line["session_id"], "reward": line["reward"]} for line in ended],
        "staleness": version - min(line["version"] for line in ended),
        "rows": [
            _row(line, turn, trace, group_id, (line["reward"] - mean) / (deviation + 1e-6))
            for line in ended
            for turn, trace in enumerate(line["traces"], 1)
        ],
    }


def _row(line: JsonObject, turn: int, trace: JsonObject, group_id: str, advantage: float) -> JsonObject:
    prompt, output = trace["prompt_token_ids"], trace["completion_token_ids"]
    context = len(prompt)
    return {
        "session_id": line["session_id"],
        "group_id": group_id,
        "attempt": line["attempt"],
        "branch": turn - 1,
        "turns": [{"turn": turn, "output_start": context, "end": context + len(output)}],
        "tokens": [*prompt, *output],
        "loss_mask": [0] * context + [1] * len(output),
        "logprobs": [0.0] * context + trace["logprobs"],
        "weight_versions": [-1] * context + [line["version"]] * len(output),
        "advantage": advantage,
    }
