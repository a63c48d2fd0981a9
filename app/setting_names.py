"""Variables that look like settings and are none: misspelt ones, other people's, and a cluster's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

PREFIX = "TURNLOG_"

CLOSE = 0.75
"""How much of a name, without the prefix, has to be a setting's to be taken for it (`difflib`'s ratio). `DATABSE_URL`
has 0.96 of `DATABASE_URL`, `UPSTREAM_URL` 0.76 of `UPSTREAMS`; `REPLICAS` has 0.71 of `REPLAY`."""

_INJECTED = re.compile(
    r"""TURNLOG_(?:
      SERVICE_\w+ | PORT(?:_\w+)?
      | \w+_SERVICE_(?: HOST | PORT(?:_\w+)? )
      | \w+_PORT(?: _\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))? )?
    )""",
    re.VERBOSE,
)
"""Kubernetes sets these in each pod for a service `turnlog`, and for any `turnlog-…`."""


def strangers(environment: Mapping[str, str], known: Collection[str]) -> dict[str, str | None]:
    """Variables that are no setting, in order of their names, each with the setting that was most likely meant.

    An empty one is not set, and what a cluster injects is nobody's mistake.
    """
    names = (name for name, value in environment.items() if name.startswith(PREFIX) and value.strip())
    unknown = [name for name in names if name not in known and not _INJECTED.fullmatch(name)]
    return {name: _meant(name, known) for name in sorted(unknown)}


def _meant(name: str, known: Collection[str]) -> str | None:
    import difflib  # of which a start that all is well with needs nothing

    settings = [setting.removeprefix(PREFIX) for setting in known]
    close = difflib.get_close_matches(name.removeprefix(PREFIX), settings, n=1, cutoff=CLOSE)
    return PREFIX + close[0] if close else None
