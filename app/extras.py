"""What to install where a package of one of the extras is missing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

_OF_EXTRA = re.compile(r"(?P<package>[^;]+);\s*extra == ['\"](?P<extra>[\w.-]+)['\"]")
_OUR_OWN = re.compile(r"turnlog\[(?P<extras>[^\]]+)\]")


def install(extra: str) -> str:
    """A command that works wherever Turnlog was installed from: it names the extra's packages themselves.

    Nothing is published under the name `turnlog`, and outside a checkout there is nothing to install it from.
    """
    try:
        packages = dict.fromkeys(_packages(extra))
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install {shlex.join(packages)}"


def _packages(extra: str) -> Iterator[str]:
    """Also those of the extras that it is made of. Raises PackageNotFoundError where Turnlog is not installed."""
    for line in requires("turnlog") or []:
        found = _OF_EXTRA.fullmatch(line)
        if found is None or found["extra"] != extra:
            continue
        ours = _OUR_OWN.fullmatch(found["package"].strip())
        if ours is None:
            yield found["package"].strip()
            continue
        for name in ours["extras"].split(","):
            yield from _packages(name.strip())
