"""`python -m ops.installs WHEEL UV [PYTHON…]`: what Turnlog and each of its extras can do on each Python.

Without a PYTHON: all from 3.11 on, on PATH and of pyenv. Prints a table and the reasons of what cannot be installed.
Exit code 1 if the client, the server, the demo or the image's packages fail somewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ops.server import ROOT

IMPORTED = {
    "parquet": "pyarrow.parquet",
    "versions": "boto3",
    "otel": "opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http",
    "numpy": "numpy",
    "urls": "numpy, zstandard",
    "pandas": "pandas",
    "polars": "polars",
    "datasets": "datasets",
    "tito": "transformers, jinja2",
}
"""What a small extra brings: it is installed and imported."""

TRAINERS = ("areal", "art", "nemo-gym", "openenv", "skyrl", "tinker", "transfer-queue", "trl", "verl")
"""Gigabytes each: their packages are resolved, not installed."""

CHECKOUTS = frozenset(
    {"train", "bench", "harness", "harness-litellm", "harness-crews", "trainers", "real-engine", "docs", "dev"}
    | {"kubernetes"}
)
"""Extras that only a checkout needs."""

PATIENCE_S = 900


class Failed(Exception):
    """A command failed. The message is the end of what it printed."""


class Stand(NamedTuple):
    """An environment that is to be made in `folder`, to run in `empty`."""

    wheel: Path
    uv: str
    python: str
    folder: Path

    @property
    def empty(self) -> Path:
        return self.folder / "empty"

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    def named(self, extra: str) -> str:
        return f"turnlog[{extra}] @ {self.wheel.as_uri()}"

    def run(self, *command: str | Path) -> None:
        """Raises Failed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNLOG_", "PYTHON"))}
        words = [str(word) for word in command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        try:
            ran = subprocess.run(words, cwd=self.empty, env=kept, text=True, timeout=PATIENCE_S, check=False, **pipes)  # type: ignore[call-overload]
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{words[0]} took more than {PATIENCE_S} s") from error
        if ran.returncode:
            raise Failed(ran.stdout)

    def install(self, *what: str | Path) -> None:
        """Raises Failed."""
        self.run(self.uv, "venv", "-q", "-p", self.python, self.folder / "venv")
        self.run(self.uv, "pip", "install", "-q", "--only-binary", ":all:", "-p", self.bin / "python", *what)


def client(stand: Stand) -> str:
    """Installed by pip."""
    stand.run(stand.python, "-m", "venv", stand.folder / "venv")
    began = time.monotonic()
    stand.run(stand.bin / "pip", "install", "-q", "--disable-pip-version-check", stand.wheel)
    took = time.monotonic() - began
    stand.run(stand.bin / "turnlog", "--help")
    stand.run(stand.bin / "python", "-c", "from turnlog import AsyncTurnlog, Turnlog")
    return f"works, installed in {took:.1f} s"


def server(stand: Stand) -> str:
    stand.install(stand.named("server"))
    stand.run(stand.bin / "python", "-P", ROOT / "ops" / "survives.py")
    uvx = (stand.uv, "tool", "run", "-p", stand.python, "--find-links", stand.wheel.parent)
    stand.run(*uvx, "--refresh-package", "turnlog", "--from", "turnlog[server]", "turnlog", "demo", "--once")
    return "survives kill -9"


def demo(stand: Stand) -> str:
    stand.install(stand.named("demo"))
    stand.run(stand.bin / "turnlog", "demo", "--once")
    stand.run(stand.bin / "python", "-c", "import openai")
    return "works"


def image(stand: Stand) -> str:
    """As the Dockerfile installs it."""
    stand.install("--require-hashes", "--no-deps", "-r", ROOT / "ops" / "deploy" / "requirements.lock")
    stand.run(stand.uv, "pip", "install", "-q", "--no-deps", "-p", stand.bin / "python", stand.wheel)
    stand.run(stand.bin / "python", "-P", ROOT / "ops" / "survives.py")
    return "survives kill -9"


NEEDED: Mapping[str, Callable[[Stand], str]] = {
    "turnlog": client,
    "server": server,
    "demo": demo,
    "requirements.lock": image,
}


def imports(stand: Stand, extra: str) -> str:
    stand.install(stand.named(extra))
    stand.run(stand.bin / "python", "-c", f"import {IMPORTED[extra]}")
    return "imports"


def resolves(stand: Stand, extra: str) -> str:
    stand.run(stand.uv, "venv", "-q", "-p", stand.python, stand.folder / "venv")
    stand.run(stand.uv, "pip", "install", "-q", "--dry-run", "-p", stand.bin / "python", stand.named(extra))
    return "resolves"


def tried(wheel: Path, uv: str, python: str) -> Iterator[tuple[str, str, str]]:
    """Each extra, what it can do on that Python, and the reason why not."""
    tries = [
        *NEEDED.items(),
        *((extra, lambda stand, extra=extra: imports(stand, extra)) for extra in IMPORTED),
        *((extra, lambda stand, extra=extra: resolves(stand, extra)) for extra in TRAINERS),
    ]
    for extra, attempt in tries:
        with tempfile.TemporaryDirectory(prefix="turnlog-installs-") as folder:
            stand = Stand(wheel, uv, python, Path(folder))
            stand.empty.mkdir()
            try:
                yield extra, attempt(stand), ""
            except Failed as error:
                yield extra, "fails" if extra in NEEDED else "not available", reason(str(error))


def reason(printed: str) -> str:
    """What uv says in short, else the end of what was printed."""
    said = " ".join(printed.split())
    short = re.search(r"hint: (You require .*)", said) or re.search(r"Because (.*?),? we can conclude", said)
    return short[1] if short else said[-400:]


def pythons() -> dict[str, str]:
    """The interpreters that are there by their versions: of each minor version from 3.11 on the first one."""
    named = [f"python3.{minor}" for minor in range(11, 20)]
    at = [shutil.which(name) for name in named] + sorted(map(str, Path.home().glob(".pyenv/versions/3.*/bin/python3")))
    found: dict[str, tuple[str, str]] = {}
    for path in filter(None, at):
        version = version_of(path)
        minor = version.rpartition(".")[0]
        if version and int(minor.partition(".")[2]) >= 11:
            found.setdefault(minor, (version, path))
    return {version: path for _, (version, path) in sorted(found.items())}


def version_of(python: str) -> str:
    """As `3.12.1`; empty if it does not run, as pyenv's shims of versions that are not chosen."""
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def table(cells: Mapping[str, Mapping[str, str]]) -> str:
    """In Markdown: a row for each extra, a column for each Python."""
    rows = list(next(iter(cells.values())))
    lines = [["", *cells], ["---"] * (len(cells) + 1)]
    lines += [[f"`{row}`", *(column[row] for column in cells.values())] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.installs", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("uv")
    parser.add_argument("python", nargs="*")
    arguments = parser.parse_args(given)
    # Absolute: they run in another folder.
    named = {
        one: os.path.abspath(shutil.which(one) or parser.error(f"{one} is not a program")) for one in arguments.python
    }
    chosen = {version_of(path): path for path in named.values()} if named else pythons()
    if not chosen or "" in chosen:
        parser.error(f"{chosen['']} is not a Python" if chosen else "there is no Python from 3.11 on")
    cells: dict[str, dict[str, str]] = {}
    reasons = []
    for version, path in chosen.items():
        print(f"Python {version}: {path}", flush=True)
        column = cells[version] = {}
        for extra, can, why in tried(arguments.wheel.resolve(), arguments.uv, path):
            print(f"  {extra}: {can}", flush=True)
            column[extra] = can
            if why:
                reasons.append(f"{extra} on {version}: {why}")
    print("", table(cells), "", *reasons, sep="\n")
    return int(any(column[extra] == "fails" for column in cells.values() for extra in NEEDED))


if __name__ == "__main__":
    sys.exit(main())
