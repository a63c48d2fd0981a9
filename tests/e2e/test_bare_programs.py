"""Claude Code, Codex and OpenCode with no setting but base URL, token and model: three tasks each, and each once more
over a `kill -9` of the server.

A relay counts the replies that reached a program whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from integration.cutting import CuttingRelay
from integration.guarded import ADMIN, ENVIRONMENT, bearer
from integration.stand import Stand, standing

from e2e.programs import PROGRAMS, Place, Program
from e2e.test_programs import Said, one_call, owned, plan, two_calls, until_over

pytestmark = [pytest.mark.long, pytest.mark.harness]

NAMES = ("Claude Code", "Codex", "Codex, built in", "OpenCode, Messages", "OpenCode, Responses")
STEPS = 4
KILL_S = 1.5
"""How long a generation takes that the server is killed in."""


def several_steps(program: Program) -> Sequence[Said]:
    """Each result asks for the next call."""
    shells = [program.shell(f"echo step-$(({step} + 1))") for step in range(STEPS)]
    asked = ("Task: count", *(f"step-{step}" for step in range(1, STEPS)))
    calls = [Said(when, "Next. ", [shell]) for when, shell in zip(asked, shells, strict=True)]
    return *calls, Said(f"step-{STEPS}", "Done.")


TASKS: Mapping[str, tuple[Callable[[Program], Sequence[Said]], int]] = {
    "one call": (one_call, 1),
    "two calls at once": (two_calls, 2),
    "several steps": (several_steps, 3),
}
"""The engine's replies in each task, and the generation in which the server is killed."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with standing(tmp_path_factory.mktemp("bare"), "--seed", "5", environment=ENVIRONMENT) as made:
        made.http.headers.update(bearer(ADMIN))
        yield made


@pytest.mark.parametrize("kills", [0, 1])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", NAMES)
def test_what_was_acknowledged_is_in_the_loss_once(
    server: Stand, tmp_path: Path, name: str, task: str, kills: int
) -> None:
    server.sim.post("/sim/reset").raise_for_status()
    program, (said, killed_in) = PROGRAMS[name], TASKS[task]
    for one in (*said(program), Said("", "Fine.")):
        plan(server, one._replace(latency_s=KILL_S * kills))
    created = server.http.post("/sessions", json=program.session).json()
    talk = server.known(created["session_id"])
    with CuttingRelay(server.server.port) as relay:
        place = Place(f"{relay.base_url}{talk.path}", tmp_path, created["token"])
        process = program.start(place, "Task: count", {})
        output = until_over(process, server, talk if kills else None, killed_in)
        acknowledged = {reply for passed in relay.passed for reply in whole_replies(bytes(passed))}
    rows, committed = talk.rows(), talk.committed()
    stats, branches = server.stats(), [branch["cause"] for branch in talk.tree()["branches"]]
    died = talk.types().count("TurnAbandoned")
    sampled = sum(event["output_tokens"] for event in committed)
    loss = sum(sum(row["loss_mask"]) for row in rows)
    lost, doubled = owned(talk, rows)
    assert process.returncode == 0, output[-3000:]
    assert len(committed) == len(acknowledged)
    assert stats["started"] - len(committed) == died, "beyond the generations that died with the server there is none"
    assert (lost, doubled, loss) == (0, 0, sampled)
    assert not Counter(branches) - Counter(["start", *program.causes]), branches


CHUNK = re.compile(rb"\r\n[0-9a-f]+\r\n")
EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)


def whole_replies(passed: bytes) -> Iterator[str]:
    """The ids of the replies that came to their end, of a connection's bytes."""
    reply = ""
    for data in EVENT.findall(CHUNK.sub(b"", passed)):
        event = json.loads(data)
        match event["type"]:
            case "message_start":
                reply = event["message"]["id"]
            case "message_stop":
                yield reply
            case "response.completed":
                yield event["response"]["id"]
