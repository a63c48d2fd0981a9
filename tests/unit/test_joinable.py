"""Which turn in flight a request joins instead of opening its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tables import rows

from app.turn.in_flight import InFlightTurn, Stages, Waiter
from app.turn.retries import Retries


def turn(*, is_gone: bool = False, **fields: Any) -> InFlightTurn:
    waiter = Waiter(lambda size: None, is_disconnected=is_gone)
    return InFlightTurn("s", waiter, Stages(lambda: 0.0), waiters=[waiter], **{"body_hash": "b", **fields})


def joins(flight: InFlightTurn, request: InFlightTurn, *, is_tree: bool) -> bool:
    none = cast(Any, None)
    retries = Retries(cache=none, writer=none, followers=none, clock=none, incarnation=none, lease_s=none)
    entry = cast(Any, SimpleNamespace(session=SimpleNamespace(is_tree=is_tree)))
    return retries.joinable(entry, [flight], request) is not None


@pytest.mark.parametrize(("flight", "request_", "line", "tree"), rows("joinable"))
def test_a_request_joins_what_it_repeats(
    flight: dict[str, Any], request_: dict[str, Any], line: bool, tree: bool
) -> None:
    """Without a key: the same body of the same agent, for which no client waits, or, in a line, that the mark of a
    retry tells to be the same."""
    assert joins(turn(**flight), turn(**request_), is_tree=False) is line
    assert joins(turn(**flight), turn(**request_), is_tree=True) is tree


def test_what_ended_sessions_were_sent_is_forgotten() -> None:
    """Else a process grows with each session for as long as it lives."""
    none = cast(Any, None)
    retries = Retries(cache=none, writer=none, followers=none, clock=none, incarnation=none, lease_s=none)
    for number in range(1000):
        for turn in (1, 2):
            retries.sending(f"s{number}", turn)
            retries.record_delivery(f"s{number}", turn, delivered=True, is_replay=False)
        if number:
            retries.forget(f"s{number}")
    assert (dict(retries._sent), retries._remembered) == ({"s0": {1: True, 2: True}}, 2)
    assert not retries._sending
