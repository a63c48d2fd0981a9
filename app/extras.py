"""Which release this is, how the packages of an extra are installed, and which are missing.

The command line asks before anything else of the server is there: this imports the standard library alone.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution, requires, version

_OF_EXTRA = re.compile(r"(?P<package>[^;]+);\s*extra == ['\"](?P<extra>[\w.-]+)['\"]")
_NAME = re.compile(r"[\w.-]+")


def release() -> str:
    try:
        return version("turnlog")
    except PackageNotFoundError:
        return "0+unknown"


def install_command(extra: str) -> str:
    """The command that installs the extra's packages, by their own names.

    It works for every kind of installation: also of a wheel's file, and of a checkout.
    """
    try:
        return f"pip install {shlex.join(_packages(extra))}"
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in the checkout"


def missing_packages(extra: str) -> list[str]:
    """The extra's packages that are not installed; empty if Turnlog itself is not installed."""
    try:
        names = [name[0] for line in _packages(extra) if (name := _NAME.match(line))]
    except PackageNotFoundError:
        return []
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _packages(extra: str) -> list[str]:
    """The extra's packages with their versions. Raises PackageNotFoundError if Turnlog is not installed."""
    matches = [_OF_EXTRA.fullmatch(line) for line in requires("turnlog") or []]
    return [one["package"].strip() for one in matches if one is not None and one["extra"] == extra]
