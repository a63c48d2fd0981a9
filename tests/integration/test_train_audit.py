"""The audit of a run of `ops.train`: a whole history passes, and each thing that it promises can fail."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ops.server import VERBATIM, ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.train.audit import Evidence, account, audit, read
from ops.train.task import digest
from turnlog import Turnlog

ATTEMPTS = 2
Line = dict[str, Any]


class Run:
    """A run's folder, as trainer and agents leave it, played by hand."""

    def __init__(self, folder: Path, turnlog: Turnlog) -> None:
        self.folder = folder
        self.turnlog = turnlog
        self.version = 1

    def note(self, file: str, **line: object) -> None:
        with (self.folder / file).open("a") as notes:
            notes.write(json.dumps(line) + "\n")

    def play(self, group_id: str, attempts: int = ATTEMPTS, *, rolls_back: bool = False) -> None:
        for attempt in range(attempts):
            with self.turnlog.create_session(group_id=group_id, attempt=attempt) as session:
                messages = [{"role": "user", "content": f"{group_id}, {attempt}"}]
                message = self.ask(session, messages)
                messages += [message, {"role": "user", "content": "Go on."}]
                self.ask(session, messages)
                if rolls_back:
                    self.ask(session, [*messages[:-1], {"role": "user", "content": "Or not."}])
                session.set_reward(float(attempt))

    def ask(self, session: Any, messages: list[Line]) -> Line:
        reply = httpx.post(
            f"{session.base_url}/chat/completions",
            json={"model": "simulator", "messages": messages, "max_tokens": 20},
        )
        assert reply.status_code == 200, reply.text
        turn, sha256 = int(reply.headers["x-turnlog-turn"]), hashlib.sha256(reply.content).hexdigest()
        self.note("agent-0.jsonl", reply=session.id, turn=turn, sha256=sha256)
        message: Line = reply.json()["choices"][0]["message"]
        return message

    def step(self, size: int = 1, left: str | None = None) -> None:
        groups = self.turnlog.hand_out("trainer", size=size)
        self.version += 1
        self.turnlog.resume_fleet(version=str(self.version))
        rows = [
            {
                "session_id": row["session_id"],
                "branch": row["branch"],
                "sampled": sum(row["loss_mask"]),
                "sha256": digest(row),
            }
            for group in groups
            for row in group["rows"]
        ]
        names = [group["group_id"] for group in groups]
        told = [{"group_id": name, "reason": left} for name in names] if left else []
        self.note("steps.jsonl", version=self.version, at=time.time(), rows=[] if left else rows, left=told)
        self.turnlog.acknowledge("trainer", names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(SimulatorProcess("--dialect", "vllm", "--silent-versions"))
        server = stack.enter_context(ServerProcess(folder, upstreams=[engine.base_url], environment=VERBATIM))
        turnlog = stack.enter_context(Turnlog(server.base_url))
        turnlog.resume_fleet(version="1")
        run = Run(folder, turnlog)
        run.play("trained")
        run.step()
        run.play("also-trained", rolls_back=True)
        run.step()
        turnlog.checkpoint("here", drain=True)
        run.play("undone")
        turnlog.restore_checkpoint("here")
        run.note("kills.jsonl", at=time.time(), name="engine", what="started", version="3")
        run.play("left-out")
        run.step(left="no signal")
        run.play("waiting")
        turnlog.hand_out("trainer")
        turnlog.create_session(group_id="half", attempt=1)
        run.play("half", attempts=1)
    (folder / "run.json").write_text(json.dumps({"max_staleness": 4}))
    run.note("engine.jsonl", at=time.time(), tokens=2 * 1000)
    return folder


def test_a_whole_history_passes(folder: Path) -> None:
    result = audit(folder)
    assert result.violations == []
    assert set(result.fates) == {
        *("trained", "rolled back", "undone", "no signal", "not yet trained", "incomplete group")
    }
    assert sum(result.fates.values()) == result.in_log
    assert (result.lost, result.doubled, result.first_turns) == (0, 0, 1)
    assert result.twice == pytest.approx(1 - result.in_log / 2000)


def _doubled(evidence: Evidence) -> None:
    turn = evidence.turns[0]
    evidence.turns.append({**turn, "turn": 50})
    evidence.excluded.append({"session_id": turn["session_id"], "turn": 50, "segment": 0, "excluded": "rolled back"})


def _unlisted(evidence: Evidence) -> None:
    evidence.excluded = [line for line in evidence.excluded if line["excluded"] != "rolled back"]


DOCTORED: list[tuple[Callable[[Evidence], object], str]] = [
    (lambda e: e.steps[0]["rows"].pop(0), "its group is acknowledged, and it is in no step"),
    (lambda e: e.steps[1]["rows"].append(e.steps[0]["rows"][0]), "is in 2 steps"),
    (lambda e: e.steps[0]["rows"][0].update(sha256="0"), "the step's tokens are not the export's"),
    (lambda e: e.steps[0]["rows"][0].update(session_id="nobody"), "branch 0 is in a step, not in the export"),
    (_unlisted, "of the log is accounted for nowhere"),
    (
        lambda e: e.replies.append({"reply": e.turns[0]["session_id"], "turn": 99}),
        "acknowledged, and is not in the log",
    ),
    (lambda e: e.turns.pop(0), "was acknowledged, and is not in the log"),
    (_doubled, "1 requests were committed twice"),
    (lambda e: e.turns[-1].update(dispatched="1"), "was sent to weights 1, 4 were loaded before"),
    (lambda e: e.turns[-1].update(dispatched=None), "was sent to weights None, 4 were loaded before"),
]
"""What is done to the evidence, and what the audit says."""


def test_each_promise_can_fail(folder: Path) -> None:
    evidence = read(folder)[0]
    for doctor, told in DOCTORED:
        doctored = copy.deepcopy(evidence)
        doctor(doctored)
        assert any(told in violation for violation in account(doctored).violations), told
