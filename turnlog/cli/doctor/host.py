"""The machine: Python, packages, open files, memory."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from app.extras import install, missing
from turnlog.cli.doctor.findings import Finding, ok, problem, warning

OPEN_FILES = 4096
"""A turn in flight has two sockets; a shell's usual 1024 are five hundred agents."""

_OF_SERVER = re.compile(r"^[^;]*$|extra == ['\"]server['\"]")
"""A requirement of the server's: of no extra, or of its own."""

_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def versions() -> Iterator[Finding]:
    """Of Python and of what is installed, against what this version says it needs."""
    try:
        needed = [line for line in requires("turnlog") or [] if _OF_SERVER.search(line)]
    except PackageNotFoundError:
        yield warning("packages", "turnlog itself is not installed as a package", "pip install its wheel or checkout")
        return
    running = sys.version.split()[0]
    beyond = _beyond(running, metadata("turnlog")["Requires-Python"])
    if beyond is None:
        yield ok("python", f"{running} ({sys.executable})")
    else:
        yield problem("python", f"{running}, needed is {beyond}", "make the virtual environment with another Python")
    wrong = [fault for line in needed if (fault := _fault(line)) is not None]
    for fault in wrong:
        yield problem("packages", fault, "install turnlog anew, best from ops/deploy/requirements.lock")
    if not wrong:
        yield ok("packages", f"turnlog {version('turnlog')}, {len(needed)} packages as it needs them")
    if missing("parquet"):
        yield ok("packages", f"without pyarrow format=parquet is 400 unsupported; {install('parquet')} brings it")


def _fault(requirement: str) -> str | None:
    """What is wrong with a package that is needed."""
    name = re.split(r"[\[<>=;( ]", requirement, maxsplit=1)[0]
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is missing"
    beyond = _beyond(found, requirement)
    return None if beyond is None else f"{name} is {found}, needed is {beyond}"


def _beyond(found: str, requirement: str) -> str | None:
    """The bound that a version does not keep; the project's own requirements have no other operators than these two."""
    for operator, bound in _BOUND.findall(requirement):
        if (_numbers(found) >= _numbers(bound)) != (operator == ">="):
            return f"{operator}{bound}"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """The release without trailing zeros: 3.0 is 3."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text, maxsplit=1)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        yield warning(
            "open files",
            f"{soft} here; each turn in flight takes two",
            f"ulimit -n {OPEN_FILES * 4} before the server starts (at most {most}), or LimitNOFILE= of systemd",
        )
    else:
        yield ok("open files", f"{soft}")


def memory() -> int:
    """Bytes that this process may use: the machine's, or what its control group leaves it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return whole
    return min(whole, int(allowed)) if allowed.isdecimal() else whole
