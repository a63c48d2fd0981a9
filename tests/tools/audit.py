"""The one audit of a store: what clients were told is in it once, to the byte, and nothing was committed twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.store.database import Database
from ops.store_command import silent
from ops.verify import Acknowledged, Problem, Report, verify
from ops.verify.acknowledged import check


class Audited(NamedTuple):
    """Acknowledged turns that are not there as they were given; how many keys were committed twice; all problems."""

    lost: list[Acknowledged]
    doubled: int
    problems: list[Problem]


async def audit(database: Database, acknowledged: Iterable[Acknowledged], *, whole: bool = True) -> Audited:
    """Look for the acknowledged turns; `whole`: and run `ops.verify` over the store. A server may write meanwhile."""
    report = await verify(database) if whole else Report()
    doubled = await check(database, acknowledged, report, silent)
    return Audited(report.missing, doubled, report.problems)
