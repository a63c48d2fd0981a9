"""Generates the sync client from the async one: `python -m ops.unasync`.

`--check` only reports whether it is current.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

from ops.server import ROOT

CLIENT = ROOT / "turnlog" / "client"
SOURCE, TARGET = "_async", "_sync"

NAMES = {
    "AsyncClient": "Client",
    "AsyncEvents": "Events",
    "AsyncExport": "Export",
    "AsyncOpenAI": "OpenAI",
    "AsyncSession": "Session",
    "AsyncTransport": "Transport",
    "AsyncTurnlog": "Turnlog",
    "DefaultAsyncHttpxClient": "DefaultHttpxClient",
    "aclose": "close",
    "aiter_raw": "iter_raw",
    "asyncio": "time",
    SOURCE: TARGET,
}
"""Names to replace in addition to those that unasync knows: `await`, `async`, `AsyncIterator`, `__aenter__`, ..."""

NOTICE = "# Made from turnlog/client/_async by `python -m ops.unasync`. Do not edit.\n"


def generate() -> dict[str, str]:
    """The texts of the generated sync files by file name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = folder / SOURCE, folder / TARGET
        shutil.copytree(CLIENT / SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        for file in source.glob("*.py"):
            text = file.read_text()
            for asynchronous, synchronous in NAMES.items():
                # unasync replaces names in code only, not in docstrings.
                text = text.replace(f"`{asynchronous}", f"`{synchronous}")
            file.write_text(text)
        rule = unasync.Rule(f"/{SOURCE}/", f"/{TARGET}/", NAMES)
        unasync.unasync_files([str(file) for file in source.glob("*.py")], [rule])
        return {file.name: _tidy(file.name, NOTICE + file.read_text()) for file in sorted(target.glob("*.py"))}


def _tidy(name: str, text: str) -> str:
    """Format again, because lines are shorter without `await` and imports sort differently."""
    for command in (["check", "--select", "I,UP028", "--fix", "--unsafe-fixes", "--quiet"], ["format", "--quiet"]):
        place = ["--stdin-filename", f"turnlog/client/{TARGET}/{name}", "-"]
        ruff = [sys.executable, "-m", "ruff", *command, *place]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return text


def is_current() -> bool:
    return generate() == {file.name: file.read_text() for file in sorted((CLIENT / TARGET).glob("*.py"))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.unasync", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the files are outdated")
    if parser.parse_args().check:
        return 0 if is_current() else 1
    for name, text in generate().items():
        (CLIENT / TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
