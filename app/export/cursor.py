"""An export's position, and the cursors that encode it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from app.domain import cursors
from app.domain.patterns import MAX_INTEGER
from app.errors import InvalidRequest
from app.export.query import ExportQuery
from app.store.reads import Position

NO_VERSION = -1
"""In a cursor: no weight version in the store is a number."""


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An export's position. `high` None: up to the time of the request.

    `at` is the position of the last page. `given`: only so many of that page's rows were sent, excluded ones counted.
    `newest` is the largest weight version in the store when the window was fixed, `NO_VERSION` if none was a number, so
    that a repeated window gives the same rows. Cursors of earlier releases do not contain it.
    """

    epoch: str
    low: Position
    high: Position | None = None
    at: Position | None = None
    given: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)] | None = None
    newest: Annotated[int, msgspec.Meta(ge=NO_VERSION, le=MAX_INTEGER)] | None = None

    def encode(self) -> str:
        return cursors.encode(self)

    @property
    def place(self) -> Position:
        """The position after which the export resumes."""
        if self.at is None:
            return self.low
        return self.at if self.given is None else Position(self.at.tx, self.at.position - 1)

    def behind(self, at: Position, number: int = 1, total: int = 1) -> str:
        """The cursor after row `number` of a page's `total` rows; empty if the export has no cursors."""
        if not self.epoch:
            return ""
        return msgspec.structs.replace(self, at=at, given=number if number < total else None).encode()

    def as_of(self, query: ExportQuery) -> ExportQuery:
        """Set which weight version is current, unless the client does. Raises InvalidRequest."""
        if query.max_staleness is None or query.weight_version is not None:
            return query
        if self.newest is None:
            raise InvalidRequest("the cursor does not say which weight version was the newest: name weight_version")
        current = None if self.newest == NO_VERSION else self.newest
        return query.model_copy(update={"weight_version": current})


def decode_cursor(text: str) -> Cursor:
    """Raises InvalidRequest."""
    found: Cursor = cursors.decode(text, Cursor, "an export")
    return found
