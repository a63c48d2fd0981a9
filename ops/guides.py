"""``python -m ops.guides PAGE...``: runs the code of a page in docs/ against a server and an engine simulator.

The pages are the only place where that code is. The Python blocks of a page are one script, in their order; `--python`
names the interpreter it runs in, because trainers and harnesses want environments of their own. A page says on a line
``<!-- needs: trl, datasets -->`` which modules it imports beside the client's own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess

SERVER = "http://127.0.0.1:8000"
ENGINE = "http://127.0.0.1:30000"
"""The addresses that pages are written with."""

TIMEOUT_S = 300.0

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page that name a language: (language, text)."""
    return _BLOCK.findall(page)


def script(page: str) -> str:
    """The Python blocks of a page as one program."""
    return "\n".join(text for language, text in blocks(page) if language == "python")


def needs(page: str) -> list[str]:
    """The modules that the page's code imports and Turnlog does not bring."""
    found = _NEEDS.search(page)
    return [name.strip() for name in found[1].split(",")] if found else []


def missing(page: str, python: str = sys.executable) -> list[str]:
    """Those of its modules that this interpreter lacks."""
    probe = (
        "import importlib.util, sys\nfor name in sys.argv[1:]:\n    if not importlib.util.find_spec(name): print(name)"
    )
    done = subprocess.run([python, "-c", probe, *needs(page)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def run(page: Path, server: str, engine: str, python: str = sys.executable) -> str:
    """What the page's code printed. Raises subprocess.CalledProcessError, with `output` and `stderr`."""
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
    """0: every page ran to its end. 1: one did not, and what it said is on standard error."""
    parser = argparse.ArgumentParser(prog="python -m ops.guides", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the page's packages")
    options = parser.parse_args(arguments)
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="turnlog-guides-") as folder,
        SimulatorProcess("--seed", "5") as engine,
        ServerProcess(Path(folder), upstreams=[engine.base_url]) as server,
    ):
        for page in options.pages:
            print(f"== {page}", flush=True)
            try:
                print(run(page, server.base_url, engine.base_url, options.python), end="")
            except subprocess.CalledProcessError as error:
                print(error.output, error.stderr, sep="", end="", file=sys.stderr)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
