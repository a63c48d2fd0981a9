"""Logs that the fold refuses, because a chain of their turns would lead nowhere or never end."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from helpers.log import committed, created, opened
from tables import rows

from app.domain.events import TYPES, Event, Recorded, UnknownEvent
from app.domain.session import Session, fold


def folded(**changes: dict[str, Any]) -> Session:
    """A log of two turns, the second of which continues the first; `first` and `second` are changed."""
    first = {"turn": 1, "parent": 0, "fence": 2, **changes.get("first", {})}
    second = {"turn": 2, "parent": 1, "fence": 4, "base_messages": 2, "base_tokens": 3, **changes.get("second", {})}
    events = [created(), opened(1, 0), committed(**first), opened(2, 1), committed(**second)]
    found = fold("s", [Recorded(seq, 1.0, event) for seq, event in enumerate(events, 1)])
    assert found is not None
    return found


def test_a_sound_log_has_chains_that_end() -> None:
    session = folded()
    assert [turn.number for turn in session.message_chain(2)] == [1, 2]
    assert [turn.number for turn in session.token_chain(2)] == [1, 2]
    anew = folded(second={"parent": 0, "base_messages": 0, "base_tokens": 0})
    assert [turn.number for turn in anew.message_chain(2)] == [2]


@pytest.mark.parametrize(
    "changes",
    rows("fold_refused"),
    ids=str,
)
def test_a_turn_that_cannot_follow_its_parent_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnknownEvent, match="cannot follow turn"):
        folded(**changes)


def smallest(kind: type[Event]) -> Event:
    """The event with the smallest value for each field that it must have."""
    values: dict[object, object] = {bool: True, int: 1, float: 1.0, str: "s", tuple: ()}
    fields = {field.name: field.type for field in msgspec.structs.fields(kind) if field.required}
    given = {
        name: get_args(hint)[0] if get_origin(hint) is Literal else values[get_origin(hint) or hint]
        for name, hint in fields.items()
    }
    return kind(**given)


@pytest.mark.parametrize("name", sorted(TYPES.keys() - {"SessionCreated", "TurnOpened", "TurnCommitted"}))
def test_the_fold_has_a_case_for_every_event(name: str) -> None:
    """Without one, its sessions could not be read."""
    events = [created(), opened(1, 0), committed(turn=1, parent=0, fence=2), smallest(TYPES[name])]
    assert fold("s", [Recorded(seq, 1.0, event) for seq, event in enumerate(events, 1)]) is not None
