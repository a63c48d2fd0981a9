"""Checks the machine: Python, packages, open files, memory."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from app.extras import install_command, missing_packages
from turnlog.cli.doctor.findings import Finding, ok, problem, warning

OPEN_FILES = 4096
"""Enough descriptors: a turn in flight has two sockets, so the usual 1024 suffice for five hundred agents."""

_OF_SERVER = re.compile(r"^[^;]*$|extra == ['\"]server['\"]")
"""Is it a requirement of the server: without an extra, or of the server's extra?"""

_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def versions() -> Iterator[Finding]:
    """Python and the installed packages, compared with this version's requirements."""
    try:
        needed = [line for line in requires("turnlog") or [] if _OF_SERVER.search(line)]
    except PackageNotFoundError:
        yield warning(
            "packages", "turnlog itself is not installed as a package", "install its wheel or checkout with pip"
        )
        return
    running = sys.version.split()[0]
    beyond = _beyond(running, metadata("turnlog")["Requires-Python"])
    if beyond is None:
        yield ok("python", f"{running} ({sys.executable}), {platform.platform()}")
    else:
        yield problem(
            "python", f"{running}; Turnlog requires {beyond}", "make the virtual environment with another Python"
        )
    wrong = [fault for line in needed if (fault := _fault(line)) is not None]
    for fault in wrong:
        yield problem("packages", fault, "reinstall turnlog, best from ops/deploy/requirements.lock")
    if not wrong:
        yield ok("packages", f"turnlog {version('turnlog')}, {len(needed)} packages at the required versions")
    if missing_packages("parquet"):
        yield ok(
            "packages",
            "pyarrow is not installed: exports with format=parquet get 400 unsupported; to install it: "
            f"{install_command('parquet')}",
        )


def _fault(requirement: str) -> str | None:
    """The problem of a required package."""
    name = re.split(r"[\[<>=;( ]", requirement, maxsplit=1)[0]
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is missing"
    beyond = _beyond(found, requirement)
    return None if beyond is None else f"{name} is {found}; Turnlog requires {beyond}"


def _beyond(found: str, requirement: str) -> str | None:
    """The bound that a version violates; the project's requirements use only these two operators."""
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
    """The memory in bytes that this process may use: the machine's, or its control group's limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return whole
    return min(whole, int(allowed)) if allowed.isdecimal() else whole
