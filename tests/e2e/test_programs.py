"""Agent programs with a base URL and a token, against Turnlog: what they sample is in the log and in the loss, once.

Beside plain tasks: calls, sub-agents, a compaction, engines that fail, and a server that is killed in the middle.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from integration.guarded import ADMIN, ENVIRONMENT, bearer
from integration.stand import Stand, Talk, standing

from e2e.programs import PROGRAMS, RUN_S, Call, Place, Program

pytestmark = [pytest.mark.long, pytest.mark.harness]

TASK = "Task: count"
LIBRARIES = ("anthropic", "anthropic, streamed", "openai-agents", "openai-agents, by id")
ALL_BUT_ONE = tuple(name for name in PROGRAMS if name != "anthropic")
"""`test_restarts` kills the server for that one, `test_odd_engines` lets it call twice at once."""
STEPS = 4


class Said(NamedTuple):
    """The engine's reply to the first request whose last message holds `when`."""

    when: str
    text: str = ""
    calls: Sequence[Call] = ()
    latency_s: float = 0.0


class Case(NamedTuple):
    """`said(program)` are the engine's replies, `causes(program)` those of the branches besides the first, `fault` what
    befalls the engine or the server once, `killed_in` the generation in which the server is killed. The tasks `later`
    are given to new processes that go on with the conversation. Programs of a library's agents, which start slowly, are
    in the cases that say so."""

    said: Callable[[Program], Sequence[Said]]
    causes: Callable[[Program], Sequence[str]] = lambda program: ()
    fault: str = ""
    programs: Sequence[str] = tuple(name for name in PROGRAMS if name not in LIBRARIES)
    more: Mapping[str, str] = {}
    task: str = TASK
    later: Sequence[str] = ()
    killed_in: int = 1


def one_call(program: Program, latency_s: float = 0.0) -> Sequence[Said]:
    return Said(TASK, "Let me see.", [program.shell("echo one-$((1+0))")], latency_s), Said("one-1", "Done.")


def two_calls(program: Program) -> Sequence[Said]:
    calls = [program.shell(f"echo {word}-$((1+1))") for word in ("one", "two")]
    return Said(TASK, "Let me see. ", calls), Said("two-2", "Done.")


def several_steps(program: Program, latency_s: float = 0.0) -> Sequence[Said]:
    """Each result asks for the next call."""
    asked = (TASK, *(f"step-{step}" for step in range(1, STEPS)))
    calls = [[program.shell(f"echo step-$(({step} + 1))")] for step in range(STEPS)]
    said = (Said(when, "Next. ", shell, latency_s) for when, shell in zip(asked, calls, strict=True))
    return *said, Said(f"step-{STEPS}", "Done.")


def compaction(program: Program) -> Sequence[Said]:
    return (
        Said("CRITICAL: Respond with TEXT ONLY", "<summary>It counts.</summary>"),
        Said(TASK, "First. ", [program.shell("echo one-$((1+0))")]),
        Said("one-1", "Second. ", [program.shell("echo two-$((1+1))")]),
        Said("two-2", "Done."),
    )


def sub_agent(program: Program) -> Sequence[Said]:
    assert program.agent is not None
    return (
        Said(TASK, "Somebody else may.", [program.agent("Subtask: look")]),
        Said("Subtask: look", "Found it."),
        Said("agent_id", "Wait.", [program.shell("sleep 1; echo waited")]),
        Said("Found it.", "Done."),
    )


def sub_agents(program: Program) -> Sequence[Said]:
    assert program.agent is not None
    sides = ("left", "right")
    return (
        Said(TASK, "Two may.", [program.agent(f"Subtask: look {side}") for side in sides]),
        *(Said(f"Subtask: look {side}", "Look.", [program.shell(f"echo {side}-$((1+0))")]) for side in sides),
        *(Said(f"{side}-1", f"Found {side}.") for side in sides),
        Said("agent_id", "Wait.", [program.shell("sleep 2; echo waited")]),
    )


def goes_on(program: Program) -> Sequence[Said]:
    return (
        *one_call(program),
        Said("And again", "Again.", [program.shell("echo two-$((1+1))")]),
        Said("two-2", "Done."),
    )


AGENTS = ("Claude Code", "Codex")
SUBAGENTS = [name for name, program in PROGRAMS.items() if program.agent]
LONG = f"{'count ' * 18_000}{TASK}"
SMALL = {"CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "10", "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"}
CASES: Mapping[str, Case] = {
    "plain": Case(lambda program: [Said(TASK, "Done.")]),
    "one call": Case(one_call),
    "two calls at once": Case(two_calls, programs=ALL_BUT_ONE),
    "a sub-agent": Case(sub_agent, lambda program: [program.agent_cause], programs=SUBAGENTS),
    "two sub-agents at once": Case(sub_agents, lambda program: ["agent", "agent"], programs=AGENTS),
    "a compaction": Case(compaction, lambda program: ["fork", "compaction"], "", ["Claude Code"], SMALL, LONG),
    "a compaction, asked for without tools": Case(
        lambda program: [Said("handoff summary", "It counts."), *one_call(program)],
        lambda program: ["drift", "root"],
        programs=["Codex"],
        more={"model_auto_compact_token_limit": "5000"},
        task=LONG,
    ),
    "a compaction by the server, which is killed": Case(
        lambda program: [Said("Summarize this conversation", "It counts.", latency_s=1.5), *one_call(program)],
        lambda program: ["root"],
        "kill",
        ["Codex, built in"],
        {"model_auto_compact_token_limit": "5000"},
        LONG,
        killed_in=2,
    ),
    "goes on later": Case(goes_on, programs=AGENTS, later=["And again", "A third time"]),
    **{f"engine: {fault}": Case(one_call, fault=fault) for fault in ("status_500", "status_503", "status_529")},
    "engine: reset": Case(one_call, fault="reset", programs=tuple(PROGRAMS)),
    "kill -9 of the server": Case(lambda program: one_call(program, 1.5), fault="kill", programs=ALL_BUT_ONE),
    "kill -9 after steps": Case(lambda program: several_steps(program, 1.5), fault="kill", killed_in=3),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with standing(tmp_path_factory.mktemp("programs"), "--seed", "5", environment=ENVIRONMENT) as made:
        made.http.headers.update(bearer(ADMIN))
        yield made


@pytest.mark.parametrize(
    ("program", "case"), [(program, case) for case, found in CASES.items() for program in found.programs]
)
def test_what_a_program_sampled_is_in_the_loss_once(server: Stand, tmp_path: Path, program: str, case: str) -> None:
    server.sim.post("/sim/reset").raise_for_status()
    ran, wanted = PROGRAMS[program], CASES[case]
    for said in (*wanted.said(ran), Said("", "Fine.")):
        plan(server, said)
    if wanted.fault not in ("", "kill"):
        server.sim.post("/sim/faults", json={"fault": wanted.fault}).raise_for_status()
    created = server.http.post("/sessions", json=ran.session).json()
    talk = server.known(created["session_id"])
    place = Place(f"{server.base_url}{talk.path}", tmp_path, created["token"])
    for start, task in ((ran.start, wanted.task), *((ran.goes_on, task) for task in wanted.later)):
        assert start is not None
        process = start(place, task, wanted.more)
        output = until_over(process, server, talk if wanted.fault == "kill" else None, wanted.killed_in)
        if process.returncode != 0:
            break
    branches = [branch["cause"] for branch in talk.tree()["branches"]]
    rows = talk.rows()
    loss = sum(sum(row["loss_mask"]) for row in rows)
    sampled = server.stats()["sampled_tokens"]
    lost, doubled = owned(talk, rows)
    false_forks = sum((Counter(branches) - Counter(["start", *ran.causes, *wanted.causes(ran)])).values())
    assert process.returncode == 0, output[-3000:]
    assert (lost, doubled, false_forks) == (0, 0, 0), branches
    if wanted.fault not in ("reset", "kill"):
        assert sampled == loss


def until_over(process: subprocess.Popen[str], server: Stand, killed: Talk | None, killed_in: int = 1) -> str:
    """The program's output. The server is killed in the generation of this number for `killed`."""
    try:
        if killed is not None:
            server.until_generating(killed, killed_in)
            server.server.kill()
            server.server.start()
        output, _ = process.communicate(timeout=RUN_S)
    finally:
        process.kill()
    return output


def plan(server: Stand, said: Said, count: int = 9) -> None:
    sim: dict[str, Any] = {"text": said.text, "reasoning": True, "latency_s": said.latency_s}
    sim |= {"calls": said.calls} if said.calls else {"tool_calls": False}
    server.sim.post("/sim/replies", json={"when": said.when, "sim": sim, "count": count}).raise_for_status()


def owned(talk: Talk, rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Turns that are in the loss of no row, and of several."""
    owners = Counter(
        span["turn"]
        for row in rows
        for span in row["turns"]
        if any(row["loss_mask"][span["output_start"] : span["end"]])
    )
    turns = [event["turn"] for event in talk.committed()]
    return sum(owners[turn] == 0 for turn in turns), sum(count > 1 for count in owners.values())
