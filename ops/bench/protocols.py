"""CPU of a turn in each protocol, over that of the same turn as a chat: short ones, and ones like Claude Code's."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.measure import save_figures, table
from ops.bench.profile import top_frames
from ops.bench.sessions import SIM, WIRES, Script, opening_messages, short_turns
from ops.bench.stand import Side, cores, simulator, turnlog

TOOLS, TOOL_BYTES, SYSTEM_BYTES = 24, 2400, 16_000
"""Claude Code 2.1 sends 24 tools and system text, 78 KB in all."""
TURNS_PER_SESSION = 8
PROFILE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each period")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", choices=sorted(WIRES), help="afterwards, profile the large turns of a protocol")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores()
    rows: list[Mapping[str, Any]] = []
    with simulator(cpu_sets) as engine, turnlog(engine, cpu_sets, arguments.folder) as server:
        for size, scripts in (("2 KiB", _short()), ("78 KB, 24 tools", _large())):
            sides = {
                name: await Side(
                    [server], script, clients=arguments.clients, turns_per_session=TURNS_PER_SESSION
                ).warm_up()
                for name, script in scripts.items()
            }
            rows += await _compared(size, sides, arguments)
        table(rows)
        if arguments.profile:
            side = Side([server], _large()[arguments.profile], clients=arguments.clients, turns_per_session=8)
            await _profile(side, server.pid, server.database_path.parent)
    save_figures("protocols", {"rows": rows})
    return 1 if any(row["errors"] for row in rows) else 0


async def _compared(size: str, sides: Mapping[str, Side], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Alternating periods on one server; a ratio compares the periods of one round."""
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    errors = dict.fromkeys(sides, 0)
    for number in range(arguments.rounds):
        for name in sorted(sides, reverse=number % 2 == 1):
            await sides[name].create_ahead(arguments.seconds)
            period = await sides[name].run_period(arguments.seconds)
            cpu[name].append(period.cpu_ms)
            errors[name] += sum(period.errors.values())
    return [
        {
            "request": size,
            "protocol": name,
            "CPU ms a turn": statistics.median(cpu[name]),
            "CPU / chat": statistics.median(own / chat for own, chat in zip(cpu[name], cpu["chat"], strict=True)),
            "errors": errors[name],
        }
        for name in sides
    ]


async def _profile(side: Side, pid: int, folder: Path) -> None:
    await side.warm_up()
    await side.create_ahead(PROFILE_S + 1)
    running = asyncio.create_task(side.run_period(PROFILE_S + 1))
    for frame, share in await top_frames(pid, PROFILE_S, folder):
        print(f"{share:>6}  {frame}")
    await running


def _short() -> dict[str, Script]:
    plain = short_turns(2048, TURNS_PER_SESSION)
    return {name: plain._replace(wire=wire) for name, wire in WIRES.items()}


def _large() -> dict[str, Script]:
    system = "".join(msgspec.json.decode(one)["content"] for one in opening_messages(SYSTEM_BYTES))
    opening = opening_messages(200)
    made = {}
    for name, (tools, said) in _spelled(system).items():
        more = b"," + msgspec.json.encode({"tools": tools, **said})[1:-1]
        made[name] = Script(opening, SIM, more, WIRES[name])
    made["chat"] = made["chat"]._replace(opening=[msgspec.json.encode({"role": "system", "content": system}), *opening])
    return made


def _spelled(system: str) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Each protocol's tools, and its field for the system's text."""
    tools = []
    for number in range(TOOLS):
        text = msgspec.json.decode(opening_messages(TOOL_BYTES, seed=number)[0])["content"]
        parameters = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}
        tools.append({"name": f"tool_{number}", "description": text, "parameters": parameters})
    blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    return {
        "chat": ([{"type": "function", "function": tool} for tool in tools], {}),
        "messages": (
            [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools],
            {"system": blocks},
        ),
        "responses": ([{"type": "function", **tool} for tool in tools], {"instructions": system, "store": False}),
    }
