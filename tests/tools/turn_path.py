"""The way of one plain turn through the code: files, functions, calls and types, as a tracer sees them.

Run it in the checkout that is to be looked at: `python tests/tools/turn_path.py [--list]`. A server with a fresh SQLite
store and a simulated engine runs here; of several equal turns (2 KiB, the second and later ones of a session) the one
with the fewest calls counts, since background work adds to the others. The first line is with the default features,
the second without any.
"""

from __future__ import annotations

import argparse
import asyncio
import dis
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path.cwd()
TURNS = 12
ROOMS = tuple(f"{ROOT / room}{os.sep}" for room in ("app", "workers"))
FEATURES = ROOT / "app" / "features"
RESUME = dis.opmap["RESUME"]
PARTS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
"""Of functions, which no step is named after."""

Path_ = dict[str, Any]
"""What a turn does: `calls` by "<file> <function>" in the order of the first call, `crossings` between files, all
`python` and `builtin` calls, and `types` of values that our functions first got or gave after the engine's answer."""


class Tracer:
    """Counts calls of functions in `ROOMS`, calls that lead from one of their files to another, and calls of all."""

    def __init__(self) -> None:
        self._names: dict[CodeType, tuple[str, str] | None] = {}
        self.clear()

    def clear(self) -> None:
        self.calls: Counter[str] = Counter()
        self.crossings = self.python = self.builtin = 0
        self.types: dict[str, bool] = {}
        self._answered = False

    def path(self) -> Path_:
        types = [name for name, is_later in self.types.items() if is_later]
        return {
            "calls": dict(self.calls),
            "crossings": self.crossings,
            "python": self.python,
            "builtin": self.builtin,
            "types": types,
        }

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            self.builtin += 1
            return
        if event not in ("call", "return"):
            return
        name = self._name(frame.f_code)
        if event == "return":
            if name is not None:
                self._see(argument)
                self._answered |= name[0].startswith("app/upstream/") and argument is not None
            return
        code = frame.f_code.co_code
        if code[frame.f_lasti] == RESUME and code[frame.f_lasti + 1] & 3:
            return  # A coroutine or generator that goes on is no new call.
        self.python += 1
        if name is None or frame.f_code.co_name in PARTS:
            return
        self.calls[" ".join(name)] += 1
        caller = frame.f_back and self._name(frame.f_back.f_code)
        self.crossings += caller is not None and caller[0] != name[0]
        for value in list(frame.f_locals.values()):
            self._see(value)

    def _see(self, value: Any) -> None:
        """Note the type of a value that carries facts: a struct, a named tuple, a data class."""
        kind = type(value)
        if kind.__module__.partition(".")[0] in ("app", "workers") and any(
            hasattr(kind, mark) for mark in ("__struct_fields__", "_fields", "__dataclass_fields__")
        ):
            self.types.setdefault(kind.__qualname__, self._answered)

    def _name(self, code: CodeType) -> tuple[str, str] | None:
        if code not in self._names:
            inside = code.co_filename.startswith(ROOMS)
            file = os.path.relpath(code.co_filename, ROOT) if inside else ""
            self._names[code] = (file, code.co_qualname) if inside else None
        return self._names[code]


def main() -> None:
    """Print the counts, and with `--list` each function in the order of its first call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="each function, in the order of its first call")
    parser.add_argument("--json", action="store_true", help="this environment's path alone, as JSON")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(_traced_path()))
        return
    whole, kernel = _path_of({}), _path_of({"TURNLOG_FEATURES": "none"})
    print(_counts(whole))
    print(f"kernel alone: {_counts(kernel)}")
    for what, of in (("all features", whole), ("kernel alone", kernel)):
        print(f"calls of Python functions, {what}: {of['python']}; with builtins: {of['python'] + of['builtin']}")
    print(f"types behind the engine's answer: {len(whole['types'])}: {', '.join(whole['types'])}")
    sizes = [path.read_text().count("\n") for room in ROOMS for path in Path(room).rglob("*.py") if not _is_extra(path)]
    print(f"kernel: {sum(sizes)} lines in {len(sizes)} files (app without app/features, and workers)")
    if arguments.list:
        for name, count in whole["calls"].items():
            file, function = name.split(" ")
            print(f"{count:4}  {file}  {function}")


def _counts(path: Path_) -> str:
    files = {name.split(" ")[0] for name in path["calls"]}
    calls, crossings = sum(path["calls"].values()), path["crossings"]
    return f"files {len(files)}  functions {len(path['calls'])}  calls {calls}  calls between files {crossings}"


def _is_extra(path: Path) -> bool:
    return path.is_relative_to(FEATURES)


def _path_of(environment: dict[str, str]) -> Path_:
    """The path in a process of its own, whose settings are these."""
    command = [sys.executable, __file__, "--json"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    path: Path_ = json.loads(done.stdout.splitlines()[-1])
    return path


def _traced_path() -> Path_:
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
        path = asyncio.run(_served(tracer))
    sys.setprofile(None)
    return path


async def _served(tracer: Tracer) -> Path_:
    import uvicorn

    config = uvicorn.Config("app.main:app", port=0, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    paths: list[Path_] = []
    client = threading.Thread(target=_take_turns, args=(port, tracer, paths))
    client.start()
    while client.is_alive():  # rarely: what wakes this loop is in the path
        await asyncio.sleep(0.25)
    server.should_exit = True
    await serving
    best = min(paths[1:], key=lambda path: sum(path["calls"].values()))
    return best | {kind: min(path[kind] for path in paths[1:]) for kind in ("python", "builtin")}


def _take_turns(port: int, tracer: Tracer, paths: list[Path_]) -> None:
    """The client, in a thread that is not traced."""
    sys.setprofile(None)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def post(path: str, body: Any) -> Any:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{path} answered {reply.status}: {data[:200]!r}")
        return json.loads(data)

    session = post("/sessions", {})["session_id"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 2048}]
    for _ in range(TURNS):
        time.sleep(0.3)
        tracer.clear()
        reply = post(f"/sessions/{session}/v1/chat/completions", {"messages": messages})
        time.sleep(0.05)  # what follows the reply is the turn's too
        paths.append(tracer.path())
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "y" * 200}]
    connection.close()


if __name__ == "__main__":
    main()
