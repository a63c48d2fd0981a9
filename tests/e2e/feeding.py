"""Groups for the feed, and what became of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from helpers.looking import value
from integration.stand import Stand

RowId = tuple[str, int]
"""Session and segment."""


class Fed(NamedTuple):
    """Rows that Turnlog had, those of acknowledged groups, those that the trainer never got, and how often it got one
    again."""

    rows: int
    acknowledged: int
    lost: int
    doubled: int


def audit(made: Iterable[Any], acknowledged: Iterable[Any], got: Iterable[Any]) -> Fed:
    """Compare by the rows' identities."""
    expected, taken = set(made), Counter(got)
    assert not taken.keys() - expected, "the trainer got rows that Turnlog does not have"
    doubled = sum(count - 1 for count in taken.values())
    return Fed(len(expected), len(set(acknowledged)), len(expected - taken.keys()), doubled)


def fill(stand: Stand, groups: Sequence[str], attempts: int = 2) -> None:
    """Complete groups; every second session of a group has two rows."""
    for group in groups:
        for attempt in range(attempts):
            talk = stand.talk(group_id=group, attempt=attempt, on_divergence="segment")
            talk.say("What is 6 times 7?")
            if attempt % 2:
                talk.messages = []
                talk.say("Begin anew.")
            assert stand.http.put(f"{talk.path}/reward", json={"reward": float(attempt)}).status_code == 200
            assert stand.http.delete(talk.path).status_code == 204


def row_id(row: Mapping[str, Any]) -> RowId:
    """Of a row of the shape `verl`."""
    extra = row["extra_fields"]
    return extra["session_id"], extra["segment"]


def made(stand: Stand) -> dict[RowId, dict[str, Any]]:
    """Every row that Turnlog has."""
    return {row_id(row): row for row in stand.rows(shape="verl")}


def closed(stand: Stand) -> set[str]:
    """The groups that Turnlog, on SQLite, has as acknowledged."""
    found = value(stand.url, "SELECT coalesce(group_concat(group_id), '') FROM groups WHERE acked_at IS NOT NULL")
    return set(filter(None, found.split(",")))


def acknowledged(stand: Stand) -> list[RowId]:
    """Their rows."""
    groups = closed(stand)
    return [one for one, row in made(stand).items() if row["uid"] in groups]


def produce(arguments: list[str], log: str) -> None:
    """In the producer's process: its counts go to the log."""
    with open(log, "a") as said, open(f"{log}.errors", "a") as errors:
        os.dup2(said.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    from turnlog.integrations import transfer_queue  # its packages are not there for every test

    raise SystemExit(transfer_queue.main(arguments))
