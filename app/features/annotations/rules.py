"""What may be said of a session and its turns, and what the log says then."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from app.domain.columns import Column
from app.domain.decide import labelled
from app.domain.events import AnnotationWritten, ColumnRef
from app.domain.patterns import NO_NUL, TAG, is_in_row
from app.domain.session import Session
from app.errors import InvalidRequest, NotFound

MAX_VALUE = 64 << 10
"""Bytes of a value as JSON."""

MAX_DEPTH = 64
"""Lists and objects inside each other in a value."""

MAX_ANNOTATIONS, MAX_BYTES = 16_384, 256 << 20
"""Of one session, its turns' included: how many, and their bytes before compression."""

MAX_OWN = 1024
"""Annotations of the session itself: their names stand in its row, which each turn writes."""

MAX_NOTE = 4000
"""Characters of a note. It stands in the session's row, which lists read."""

MAX_TAGS = 32


def of_value(session: Session | None, session_id: str, turn: int | None, name: str, value: Any) -> AnnotationWritten:
    """The event that gives a session, or one of its turns, a JSON value. An empty note is none, and so are no tags.

    Raises SessionNotFound, SessionClosed (erased), Restored, NotFound (no such turn), InvalidRequest.
    """
    there = _place(session, session_id, turn)
    if value is None:
        raise InvalidRequest("value must not be null; DELETE removes an annotation")
    # Before the walk below, which names places by all names above them.
    if (size := len(msgspec.json.encode(value))) > MAX_VALUE:
        raise InvalidRequest(f"value: {size} bytes as JSON; the limit is {MAX_VALUE}")
    _require_storable(value, "value")
    if turn is None and name == "note":
        if not (isinstance(value, str) and len(value) <= MAX_NOTE and re.fullmatch(NO_NUL, value)):
            raise InvalidRequest(f"value: a note is a text of at most {MAX_NOTE} characters without NUL")
    elif turn is None and name == "tags":
        is_list = isinstance(value, list) and len(value) <= MAX_TAGS
        if not (is_list and all(isinstance(tag, str) and re.fullmatch(TAG, tag) for tag in value)):
            raise InvalidRequest(
                f"value: tags are a list of up to {MAX_TAGS} texts of 1 to 128 characters, none of them a control "
                "character"
            )
        value = sorted(set(value))
    if turn is None and name in ("note", "tags") and not value:
        return AnnotationWritten(name)
    return _within_limits(there, AnnotationWritten(name, turn, value, size=len(msgspec.json.encode(value))))


def of_column(
    session: Session | None, session_id: str, turn: int | None, name: str, column: Column, ref: ColumnRef
) -> AnnotationWritten:
    """As `of_value`, for a turn's column, which has as many numbers as the turn has tokens of that kind."""
    there = _place(session, session_id, turn)
    if turn is None:
        raise InvalidRequest("a column requires a turn: /sessions/{id}/turns/{n}/annotations/{name}")
    if there.is_text:
        raise InvalidRequest("a column has a number for each token; the session captures text only")
    tokens = there.turn(turn)
    count = tokens.output_tokens if column.over == "output" else tokens.token_count - tokens.base_tokens
    if ref.length != count:
        kind = "sampled" if column.over == "output" else "new"
        raise InvalidRequest(f"values: {ref.length} numbers; turn {turn} has {count} {kind} tokens ({column.over})")
    return _within_limits(there, AnnotationWritten(name, turn, column=ref, size=column.size))


def removal(session: Session | None, session_id: str, turn: int | None, name: str) -> AnnotationWritten | None:
    """The event that removes an annotation; None if there is none. Raises as `of_value`, but InvalidRequest."""
    there = _place(session, session_id, turn)
    return AnnotationWritten(name, turn) if name in there.annotations.get(turn or 0, {}) else None


def _place(session: Session | None, session_id: str, turn: int | None) -> Session:
    """Raises SessionNotFound, SessionClosed (erased), Restored, NotFound (no such turn)."""
    there = labelled(session, session_id)
    if turn is not None and turn not in there.turns:
        raise NotFound(f"turn {turn} is not committed in session {session_id}")
    return there


def _within_limits(session: Session, event: AnnotationWritten) -> AnnotationWritten:
    """Raises InvalidRequest."""
    every = [one for of_turn in session.annotations.values() for one in of_turn.values()]
    before = session.annotations.get(event.turn or 0, {}).get(event.name)
    if len(every) + (before is None) > MAX_ANNOTATIONS:
        raise InvalidRequest(f"the session has {len(every)} annotations; the limit is {MAX_ANNOTATIONS}")
    own = session.annotations.get(0, {})
    if event.turn is None and len(own) + (before is None) > MAX_OWN:
        raise InvalidRequest(f"the session itself has {len(own)} annotations; the limit is {MAX_OWN}, its turns' apart")
    size = sum(one.size for one in every) - (0 if before is None else before.size) + event.size
    if size > MAX_BYTES:
        raise InvalidRequest(f"the session's annotations would have {size} bytes; the limit is {MAX_BYTES}")
    return event


def _require_storable(value: Any, *place: str | int) -> None:
    """Raises InvalidRequest."""
    if len(place) > MAX_DEPTH + 1:
        raise InvalidRequest(f"value nests deeper than {MAX_DEPTH} levels")
    if not is_in_row(value):
        raise InvalidRequest(f"{'.'.join(map(str, place)):.200}: expected a finite number of at most 64 bits")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in inner:
        _require_storable(each, *place, part)
