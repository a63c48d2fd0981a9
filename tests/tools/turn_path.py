"""The way of one plain turn through the code: files, functions and calls, as a tracer sees them.

Run it in the checkout that is to be looked at: `python tests/tools/turn_path.py [--list]`. A server with a fresh SQLite
store and a simulated engine run here; of several equal turns (2 KiB, the second and later ones of a session) the one
with the fewest calls counts, since background work adds to the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path.cwd()
TURNS = 12
ROOMS = tuple(f"{ROOT / room}{os.sep}" for room in ("app", "workers"))

Function = tuple[str, str]
"""A file, relative to the checkout, and a function's qualified name."""


class Tracer:
    """Counts calls of functions in `ROOMS`, and calls that lead from one of their files to another."""

    def __init__(self) -> None:
        self.clear()
        self._names: dict[CodeType, Function | None] = {}

    def clear(self) -> None:
        self.calls: Counter[Function] = Counter()
        self.order: list[Function] = []
        self.crossings = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        name = self._name(frame.f_code)
        if name is None or frame.f_code.co_name in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            return
        if frame.f_lasti > 5:  # a coroutine or generator that goes on: no new call
            return
        if not self.calls[name]:
            self.order.append(name)
        self.calls[name] += 1
        caller = frame.f_back and self._name(frame.f_back.f_code)
        self.crossings += caller is not None and caller[0] != name[0]

    def _name(self, code: CodeType) -> Function | None:
        if code not in self._names:
            inside = code.co_filename.startswith(ROOMS)
            file = os.path.relpath(code.co_filename, ROOT) if inside else ""
            self._names[code] = (file, code.co_qualname) if inside else None
        return self._names[code]


def main() -> None:
    """Print the counts, and with `--list` each function in the order of its first call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="each function, in the order of its first call")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    from ops.simulator.process import SimulatorProcess

    with tempfile.TemporaryDirectory() as folder, SimulatorProcess() as engine:
        os.environ |= {
            "TURNLOG_DATABASE_URL": f"sqlite+aiosqlite:///{folder}/turnlog.db",
            "TURNLOG_UPSTREAMS": engine.base_url,
        }
        subprocess.run([sys.executable, "-m", "alembic", "upgrade", "head"], cwd=ROOT, check=True, capture_output=True)
        found = asyncio.run(_traced(tracer))
    sys.setprofile(None)
    calls, order, crossings = found
    files = {file for file, _ in order}
    print(f"files {len(files)}  functions {len(order)}  calls {calls.total()}  calls between files {crossings}")
    if arguments.list:
        for file, function in order:
            print(f"{calls[file, function]:4}  {file}  {function}")


async def _traced(tracer: Tracer) -> tuple[Counter[Function], list[Function], int]:
    import httpx
    import uvicorn

    config = uvicorn.Config("app.main:app", port=0, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    best: tuple[Counter[Function], list[Function], int] | None = None
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        session = (await client.post("/sessions", json={})).json()["session_id"]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 2048}]
        for _ in range(TURNS):
            await asyncio.sleep(0.3)
            tracer.clear()
            reply = await client.post(f"/sessions/{session}/v1/chat/completions", json={"messages": messages})
            reply.raise_for_status()
            seen = tracer.calls, tracer.order, tracer.crossings
            tracer.clear()
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "y" * 200}]
            if len(messages) > 3 and (best is None or seen[0].total() < best[0].total()):
                best = seen
    server.should_exit = True
    await serving
    assert best is not None
    return best


if __name__ == "__main__":
    main()
