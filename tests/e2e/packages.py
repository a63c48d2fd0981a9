"""The sdist and the wheel, built as CONTRIBUTING.md says, and environments to install them into."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from ops.server import ROOT

SERVER = ("app", "workers", "ops", "migrations")
"""Names that other packages have as well."""

MOMENT = {"SOURCE_DATE_EPOCH": "1700000000"}

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python")


def done(*command: str | Path, cwd: Path, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNLOG_", "PYTHON"))}
    run = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run


class Environment:
    """A virtual environment of its own, and an empty folder to run in."""

    def __init__(self, folder: Path) -> None:
        self.empty = folder / "empty"
        self.empty.mkdir(parents=True)
        self.bin = folder / "venv" / "bin"
        done(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        [self.packages] = (folder / "venv" / "lib").glob("*/site-packages")

    def pip(self, *arguments: str | Path) -> None:
        done(*PIP, self.bin / "python", *arguments, cwd=self.empty)

    def turnlog(self, *arguments: str | Path, code: int = 0, **environment: str) -> str:
        run = done(self.bin / "turnlog", *arguments, cwd=self.empty, code=code, **environment)
        return run.stderr if code else run.stdout

    def python(self, code: str) -> str:
        return done(self.bin / "python", "-c", code, cwd=self.empty).stdout

    def lend(self, *without: str) -> None:
        """The packages of these tests, but for Turnlog itself and what is to be missing."""
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            there = self.packages / entry.name
            if not entry.name.lower().startswith(("turnlog", "_turnlog", "pip", *without)) and not there.exists():
                there.symlink_to(entry)


class Built(NamedTuple):
    """`source` is a checkout without a history; `builder` has what `build.lock` pins."""

    source: Path
    builder: Environment
    sdist: Path
    wheel: Path

    def build(self, source: Path, folder: Path) -> tuple[Path, Path]:
        """The sdist of a checkout, and the wheel of that sdist."""
        done(self.builder.bin / "hatchling", "build", "-t", "sdist", "-d", folder, cwd=source, **MOMENT)
        [sdist] = folder.glob("turnlog-*.tar.gz")
        pip = (*PIP, self.builder.bin / "python", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist)
        done(*pip, cwd=folder, **MOMENT)
        [wheel] = folder.glob("turnlog-*.whl")
        return sdist, wheel


def copied(folder: Path) -> Path:
    """What a build needs of the checkout."""
    for name in ("turnlog", *SERVER):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "alembic.ini", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Built:
    """Once a run: whichever of the tests' processes comes first makes it."""
    own = tmp_path_factory.getbasetemp()
    folder = own if worker_id == "master" else own.parent
    kept = folder / "built.pickle"
    with (folder / "built.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            (folder / "built").mkdir()
            kept.write_bytes(pickle.dumps(_built(folder / "built")))
        found: Built = pickle.loads(kept.read_bytes())
    return found


def _built(folder: Path) -> Built:
    """Made by what build.lock pins, from the sdist, and that from a copy without a history."""
    source, builder = copied(folder / "source"), Environment(folder / "builder")
    builder.pip("install", "--require-hashes", "--no-deps", "-r", ROOT / "ops/deploy/build.lock")
    unfinished = Built(source, builder, folder, folder)
    sdist, wheel = unfinished.build(source, folder)
    return unfinished._replace(sdist=sdist, wheel=wheel)
