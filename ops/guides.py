"""``python -m ops.guides PAGE...``: runs the code of pages in docs/ against a server and an engine simulator.

The code exists only in the pages. The Python blocks of a page form one script, in their order. `--python` names the
interpreter to run it with, since trainers and harnesses need their own environments. `--engine` puts a running engine
in the simulator's place: a page that trains needs it. Lines in a page say what its code needs:
``<!-- needs: trl, datasets -->``: modules beside Turnlog's dependencies. ``<!-- programs: claude -->``: programs that
it starts. ``<!-- killed after: step 0 -->``: the server is killed (SIGKILL) and started again once the code has printed
a line that begins so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess

SERVER = "http://127.0.0.1:8000"
ENGINE = "http://127.0.0.1:30000"
"""The addresses that the pages use; they are replaced by those of the running server and simulator."""

TIMEOUT_S = 300.0

Restart = Callable[[], None]
"""Kills the server and starts it again."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)
_KILLED = re.compile(r"^<!-- killed after: (.*) -->$", re.MULTILINE)
_PROGRAMS = re.compile(r"^<!-- programs: (.*) -->$", re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page that name a language: (language, text)."""
    return _BLOCK.findall(page)


def script(page: str) -> str:
    """The Python blocks of a page as one program."""
    return "\n".join(text for language, text in blocks(page) if language == "python")


def needs(page: str) -> list[str]:
    """The modules that the page's code imports and that Turnlog does not depend on."""
    return _listed(_NEEDS, page)


def _listed(names: re.Pattern[str], page: str) -> list[str]:
    found = names.search(page)
    return [name.strip() for name in found[1].split(",")] if found else []


def missing(page: str, python: str = sys.executable) -> list[str]:
    """The modules and programs that the page needs and that are not there."""
    probe = (
        "import importlib.util, sys\nfor name in sys.argv[1:]:\n    if not importlib.util.find_spec(name): print(name)"
    )
    done = subprocess.run([python, "-c", probe, *needs(page)], capture_output=True, text=True, check=True)
    return [*done.stdout.split(), *(name for name in _listed(_PROGRAMS, page) if shutil.which(name) is None)]


def is_killed(page: str) -> bool:
    """Does the page need a server of its own, because it is killed?"""
    return _KILLED.search(page) is not None


def run(page: Path, server: str, engine: str, python: str = sys.executable, restart: Restart | None = None) -> str:
    """Run the page's code and return its output. Raises subprocess.CalledProcessError, with `output` and `stderr`."""
    text = page.read_text()
    killed = _KILLED.search(text)
    program = script(text).replace(SERVER, server).replace(ENGINE, engine)
    with tempfile.TemporaryDirectory(prefix="turnlog-guide-") as folder:
        path = Path(folder) / f"{page.stem.replace('-', '_')}_guide.py"
        path.write_text(program)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
        environment = {**inherited, "PYTHONPATH": str(ROOT), "TURNLOG_URL": server}
        with (
            (Path(folder) / "errors").open("w+") as errors,
            subprocess.Popen(
                [python, str(path)], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            timer = threading.Timer(TIMEOUT_S, process.kill)
            timer.start()
            try:
                printed = _printed(process, None if killed is None else killed[1], restart)
            finally:
                timer.cancel()
            if process.returncode:
                errors.seek(0)
                raise subprocess.CalledProcessError(process.returncode, process.args, printed, errors.read())
    return printed


def _printed(process: subprocess.Popen[str], place: str | None, restart: Restart | None) -> str:
    """What the process prints until it ends; the server is restarted after the first line that begins with `place`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if place is not None and line.startswith(place):
            assert restart is not None, "this page needs a server that may be killed"
            place = None
            restart()
    if not process.wait():
        assert place is None, f"no line began with {place}"
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pages. Returns 0 if all ran to their end, else 1, with the output of failed pages on standard error.

    Exits with 2 if a page, or what a page needs, is not there.
    """
    parser = argparse.ArgumentParser(prog="python -m ops.guides", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the page's packages")
    parser.add_argument("--engine", metavar="URL", help="of a running engine; without it a simulator is started")
    options = parser.parse_args(arguments)
    if shutil.which(options.python) is None:
        parser.error(f"--python: {options.python} does not exist")
    for page in options.pages:
        if not page.is_file():
            parser.error(f"{page} does not exist")
        if absent := missing(page.read_text(), options.python):
            parser.error(f"{page} needs packages or programs that are missing: {', '.join(absent)}")
    failed = 0
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-guides-"))
        engine = options.engine or running.enter_context(SimulatorProcess("--seed", "5")).base_url
        server = running.enter_context(ServerProcess(Path(folder), upstreams=[engine]))

        def restart() -> None:
            server.kill()
            server.start()

        for page in options.pages:
            print(f"== {page}", flush=True)
            try:
                print(run(page, server.base_url, engine, options.python, restart), end="")
            except subprocess.CalledProcessError as error:
                print(error.output, error.stderr, sep="", end="", file=sys.stderr)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
