"""``python -m ops.guides PAGE...``: runs the code of pages in docs/ against a server and an engine simulator.

The code exists only in the pages. The Python blocks of a page form one script, in their order. `--python` names the
interpreter to run it with, since trainers and harnesses need their own environments. `--engine` puts a running engine
in the simulator's place: a page that trains needs it. A line ``<!-- needs: trl, datasets -->`` in a page lists the
modules that its code imports in addition to Turnlog's dependencies, and ``<!-- programs: claude -->`` the programs that
it starts.
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
from collections.abc import Sequence
from pathlib import Path

from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess

SERVER = "http://127.0.0.1:8000"
ENGINE = "http://127.0.0.1:30000"
"""The addresses that the pages use; they are replaced by those of the running server and simulator."""

TIMEOUT_S = 300.0

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)
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


def run(page: Path, server: str, engine: str, python: str = sys.executable) -> str:
    """Run the page's code and return its output. Raises subprocess.CalledProcessError, with `output` and `stderr`."""
    program = script(page.read_text()).replace(SERVER, server).replace(ENGINE, engine)
    with tempfile.TemporaryDirectory(prefix="turnlog-guide-") as folder:
        path = Path(folder) / f"{page.stem.replace('-', '_')}_guide.py"
        path.write_text(program)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
        environment = {**inherited, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [python, str(path)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pages. Returns 0 if all ran to their end, else 1, with the output of failed pages on standard error."""
    parser = argparse.ArgumentParser(prog="python -m ops.guides", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the page's packages")
    parser.add_argument("--engine", metavar="URL", help="of a running engine; without it a simulator is started")
    options = parser.parse_args(arguments)
    failed = 0
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-guides-"))
        engine = options.engine or running.enter_context(SimulatorProcess("--seed", "5")).base_url
        server = running.enter_context(ServerProcess(Path(folder), upstreams=[engine]))
        for page in options.pages:
            print(f"== {page}", flush=True)
            try:
                print(run(page, server.base_url, engine, options.python), end="")
            except subprocess.CalledProcessError as error:
                print(error.output, error.stderr, sep="", end="", file=sys.stderr)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
