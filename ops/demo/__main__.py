"""Runs the demo: six agents, a kill -9, a checked export. Exit code 0 if every acknowledged turn survived, else 1.

On a terminal it then leaves the server and its page open until Ctrl-C. With `--full` it makes a realistic store
instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from app.store.opening import upgrade
from ops.demo.agent import Agent
from ops.demo.check import Findings, Row, check
from ops.demo.full import full_store
from ops.server import VERBATIM, ServerDidNotStart, ServerProcess
from ops.simulator.process import SimulatorProcess

LATENCY_MS = 700
"""Duration of a generation: long enough that the kill happens during several generations."""

IMPATIENT_S = 0.5
"""The client timeout of one agent, which is shorter than a generation."""

NAMES = ("Ada", "Blaise", "Emmy", "Kurt", "Sofia", "Tibor")
TASKS = ("Work out the crates we need.", "Check it again with other numbers.", "Sum up what you found.")


class Story:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)


class AgentsStopped(Exception):
    """The agents finished before the server could be killed, so the demo shows nothing."""


FAILURES = (AgentsStopped, ServerDidNotStart, httpx.HTTPError, TimeoutError)


async def make_agents(server: ServerProcess, service: httpx.AsyncClient) -> list[Agent]:
    agents = []
    for number, name in enumerate(NAMES):
        body = {"group_id": f"task-{number % 2}", "attempt": number // 2, "metadata": {"agent": name}}
        created = (await service.post("/sessions", json=body)).raise_for_status().json()
        client = httpx.AsyncClient(base_url=server.base_url + created["base_url"], trust_env=False)
        agents.append(Agent(name, client, created["session_id"], TASKS))
    agents[1].stream = True
    agents[-1].timeout_s = IMPATIENT_S
    return agents


async def kill_in_the_middle(
    server: ServerProcess, engine: httpx.AsyncClient, agents: Sequence[Agent], work: asyncio.Future[Any], story: Story
) -> int:
    """Kill the server when every agent has two turns and most have another in flight, and start it again.

    Returns the number of turns acknowledged before the kill.
    """
    while True:
        at_engine = (await engine.get("/sim/stats")).json()["in_flight"]
        if work.done():
            await work
            raise AgentsStopped("the agents finished before the server could be killed")
        if at_engine >= len(agents) - 2 and all(len(agent.seen) >= 2 for agent in agents):
            break
        await asyncio.sleep(0.02)
    acknowledged = sum(len(agent.seen) for agent in agents)
    server.kill()
    killed = time.monotonic()
    story.log(f"kill -9: {acknowledged} turns were acknowledged, {at_engine} generations were in flight")
    await asyncio.to_thread(server.start)
    away_s = time.monotonic() - killed
    story.log(f"the server answers again, {away_s:.1f} s after the kill, on the same file, without any repair")
    return acknowledged


async def finish(service: httpx.AsyncClient, agents: Sequence[Agent]) -> tuple[list[Row], dict[str, list[str]]]:
    """Reward and close each session. Returns the export's rows, and the lines of each session's log."""
    for agent in agents:
        where = f"/sessions/{agent.session_id}"
        reward = {"reward": round(1 / len(agent.seen), 4), "components": {"turns": float(len(agent.seen))}}
        (await service.put(f"{where}/reward", json=reward)).raise_for_status()
        (await service.delete(where)).raise_for_status()
    exported = await service.get("/export", params={"session_status": "closed"})
    rows: list[Row] = [json.loads(line) for line in exported.raise_for_status().content.splitlines()]
    logs = {}
    for agent in agents:
        events = await service.get(f"/sessions/{agent.session_id}/events")
        logs[agent.session_id] = events.raise_for_status().text.splitlines()
    return rows, logs


def report(agents: Sequence[Agent], found: Findings, rows: Sequence[Row], generations: int, before: int) -> None:
    print("\nWhat the agents received")
    print(f"  {'agent':8}{'turns':>7}{'tool calls':>12}{'repeated':>13}{'replayed':>13}")
    for agent in agents:
        calls = sum(len(seen.calls) for seen in agent.seen)
        note = "streams" if agent.stream else f"client timeout {agent.timeout_s} s" if agent.timeout_s else ""
        counts = f"{len(agent.seen):7}{calls:12}{agent.repeated:13}{agent.replayed:13}"
        print(f"  {agent.name:8}{counts}  {note}".rstrip())
    print("  repeated: requests that the agent sent again after an error or a timeout")
    print("  replayed: replies from the log, or from the turn in flight, without a second generation")
    tokens, sampled = sum(len(row["tokens"]) for row in rows), sum(sum(row["sampled_mask"]) for row in rows)
    sessions = len({row["session_id"] for row in rows})
    print("\nWhat survived")
    print(f"  acknowledged   {found.acknowledged} turns, {before} of them before the kill")
    print(f"  in the log     {found.committed} turns committed, {found.abandoned} abandoned (in flight at the kill)")
    print(f"  at the engine  {generations} generations: one for each turn, and those that the kill interrupted")
    print(f"  logs           {found.folded} of {len(NAMES)} fold and contain what their agent received")
    print(f"  export         {len(rows)} rows of {sessions} sessions: {tokens} tokens, {sampled} of them sampled\n")
    for problem in found.problems:
        print(f"LOST  {problem}")
    if not found.problems:
        print(
            f"All {found.acknowledged} acknowledged turns are stored as the agents received them: ids, logprobs, text."
        )


async def run(folder: Path, story: Story, *, stays: bool) -> bool:
    """Run the whole demo; True if no acknowledged turn is missing and none was generated twice.

    `stays`: the server runs on until Ctrl-C.
    """
    with SimulatorProcess("--seed", "7", "--latency-ms", str(LATENCY_MS)) as simulator:
        server = ServerProcess(folder, upstreams=[simulator.base_url], environment=VERBATIM)
        # Not by `alembic upgrade head`: its configuration is in the checkout alone.
        await asyncio.to_thread(upgrade, server.environment["TURNLOG_DATABASE_URL"])
        try:
            server.start()
            story.log(f"engine simulator at {simulator.base_url}, Turnlog at {server.base_url}, a new SQLite file")
            async with (
                httpx.AsyncClient(base_url=server.base_url, trust_env=False, timeout=30) as service,
                httpx.AsyncClient(base_url=simulator.base_url, trust_env=False) as engine,
            ):
                has_survived = await _run_agents(server, service, engine, story)
            if stays:
                await _until_interrupted(f"{server.base_url}/ui")
            return has_survived
        finally:
            server.stop()


async def _until_interrupted(page: str) -> None:
    print(f"\nLook at the sessions: {page}    (Ctrl-C ends the demo)", flush=True)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()  # else the end that was asked for would be told as an interruption


async def _run_agents(
    server: ServerProcess, service: httpx.AsyncClient, engine: httpx.AsyncClient, story: Story
) -> bool:
    agents = await make_agents(server, service)
    story.log(f"{len(agents)} agents start: tools, {LATENCY_MS} ms for each generation")
    work = asyncio.gather(*(agent.run() for agent in agents))
    try:
        before = await kill_in_the_middle(server, engine, agents, work, story)
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    story.log(f"all agents have finished: {sum(len(agent.seen) for agent in agents)} turns acknowledged")
    rows, logs = await finish(service, agents)
    generations = (await engine.get("/sim/stats")).json()["started"]
    for agent in agents:
        await agent.client.aclose()
    story.log("rewards set, sessions closed, exported")
    found = await check(server.environment["TURNLOG_DATABASE_URL"], agents, rows, logs)
    if generations > found.committed + found.abandoned:
        found.problems.append(f"{generations} generations for {found.committed} turns: some were generated twice")
    report(agents, found, rows, generations, before)
    return not found.problems


def _show(folder: Path, port: int, *, stays: bool) -> int:
    """Make the full store, and leave its server open if it `stays`."""
    print("Turnlog: 60 sessions in six groups, two engines; about half a minute\n")
    with full_store(folder, Story().log, port=port) as store:
        if stays:
            asyncio.run(_until_interrupted(f"{store.base_url}/ui"))
    print(f"Database and server log: {folder}")
    return 0


def main(given: Sequence[str] | None = None, prog: str = "python -m ops.demo") -> int:
    """Run the command line `given`, by default the process's own. `prog` is the program's name in its help."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep database and server log here (default: a temporary folder)")
    parser.add_argument("--once", action="store_true", help="end after the check, also on a terminal")
    parser.add_argument("--full", action="store_true", help="instead: 60 sessions in six groups, to look at")
    parser.add_argument("--port", type=int, default=0, help="with --full: the server's port (default: any free one)")
    arguments = parser.parse_args(given)
    stays = not arguments.once and sys.stdin.isatty() and sys.stdout.isatty()
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="turnlog-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if arguments.full:
            return _show(folder.resolve(), arguments.port, stays=stays)
        print("Turnlog: six agents, one engine, one kill -9\n")
        has_survived = asyncio.run(run(folder.resolve(), Story(), stays=stays))
    except KeyboardInterrupt:
        return 130
    except FAILURES as error:
        print(f"The demo could not be finished: {type(error).__name__}: {error}", file=sys.stderr)
        has_survived = False
    if arguments.folder is None and has_survived:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"Database and server log: {folder}")
    return 0 if has_survived else 1


if __name__ == "__main__":
    sys.exit(main())
