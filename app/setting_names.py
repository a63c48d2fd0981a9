"""Variables that look like settings and are none: misspelt ones, other people's, and a cluster's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

PREFIX = "TURNLOG_"

CLOSE = 0.75
"""How much of a word has to be another's to be taken for a slip in it (`difflib`'s ratio). `DATABSE` has 0.93 of
`DATABASE`, `BASE` 0.67 of it. Of a whole name, without the prefix, as much makes it the nearest."""


class Stranger(NamedTuple):
    """A variable that is no setting, the nearest setting, if any is near, and is it that one, misspelt?"""

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


def strangers(environment: Mapping[str, str], known: Collection[str]) -> list[Stranger]:
    """Variables that are no setting, in order of their names.

    An empty one is not set, and what a cluster injects is nobody's mistake.
    """
    names = (name for name, value in environment.items() if name.startswith(PREFIX) and value.strip())
    unknown = [name for name in names if name not in known and not _INJECTED.fullmatch(name)]
    return [_stranger(name, known) for name in sorted(unknown)]


def _stranger(name: str, known: Collection[str]) -> Stranger:
    import difflib  # of which a start that all is well with needs nothing

    def near(given: str, others: Collection[str]) -> list[str]:
        return difflib.get_close_matches(given, others, n=1, cutoff=CLOSE)

    def is_slip(given: str, meant: str) -> bool:
        """Other separators alone, or as many words, each of them near."""
        words, others = given.split("_"), meant.split("_")
        if "".join(words) == "".join(others):
            return True
        pairs = zip(words, others, strict=False)
        return len(words) == len(others) and all(near(word, [other]) for word, other in pairs)

    given = name.removeprefix(PREFIX)
    settings = [setting.removeprefix(PREFIX) for setting in known]
    slips = [setting for setting in settings if is_slip(given, setting)]
    nearest = near(given, slips) or near(given, settings)
    return Stranger(name, PREFIX + nearest[0] if nearest else None, bool(slips))
