"""Finds `TURNLOG_*` variables that are not settings: misspelt, unrelated, or set by a Kubernetes cluster."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

PREFIX = "TURNLOG_"

MIN_RATIO = 0.75
"""Similarity (`difflib`'s ratio) from which a word counts as a misspelling of another: `DATABSE` has 0.93 of
`DATABASE`, `BASE` 0.67. The same ratio of the whole names, without the prefix, makes a setting the nearest one."""


class UnknownName(NamedTuple):
    """A variable that is not a setting. `nearest` is the most similar setting, or None."""

    name: str
    nearest: str | None
    is_misspelt: bool


_INJECTED = re.compile(
    r"""TURNLOG_(?:
      SERVICE_\w+ | PORT(?:_\w+)?
      | \w+_SERVICE_(?: HOST | PORT(?:_\w+)? )
      | \w+_PORT(?: _\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))? )?
    )""",
    re.VERBOSE,
)
"""Kubernetes sets these in each pod for a service `turnlog`, and for any `turnlog-…`."""


def unknown_variables(environment: Mapping[str, str], known: Collection[str]) -> list[UnknownName]:
    """Variables that are not settings, ordered by name, without empty ones and those that a cluster injects."""
    names = (name for name, value in environment.items() if name.startswith(PREFIX) and value.strip())
    unknown = [name for name in names if name not in known and not _INJECTED.fullmatch(name)]
    return [_unknown_name(name, known) for name in sorted(unknown)]


def _unknown_name(name: str, known: Collection[str]) -> UnknownName:
    import difflib  # only needed if a name is unknown

    def closest(given: str, others: Collection[str]) -> list[str]:
        return difflib.get_close_matches(given, others, n=1, cutoff=MIN_RATIO)

    def is_misspelling(given: str, meant: str) -> bool:
        """Is `given` a misspelling of `meant`: only other separators, or as many words, each of them similar?"""
        words, others = given.split("_"), meant.split("_")
        if "".join(words) == "".join(others):
            return True
        pairs = zip(words, others, strict=False)
        return len(words) == len(others) and all(closest(word, [other]) for word, other in pairs)

    given = name.removeprefix(PREFIX)
    settings = [setting.removeprefix(PREFIX) for setting in known]
    misspelt = [setting for setting in settings if is_misspelling(given, setting)]
    nearest = closest(given, misspelt) or closest(given, settings)
    return UnknownName(name, PREFIX + nearest[0] if nearest else None, bool(misspelt))
