"""Conditions on the run and the group of sessions, as requests name them (`app.domain.selection`)."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, FromClause, Select, select

from app.store.dialect import begins_with
from app.store.schema import sessions

_roots = sessions.alias("roots")
_below = sessions.alias("below")


class GroupFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions on a session's run and group; None and empty: any."""

    run: str | None = None
    group_id: tuple[str, ...] = ()
    group_prefix: str | None = None

    @property
    def of_groups(self) -> bool:
        """Is it about groups?"""
        return bool(self.group_id) or self.group_prefix is not None

    def of(self, table: FromClause) -> list[ColumnElement[bool]]:
        """Conditions on rows of a table with a run and a group."""
        conditions: list[ColumnElement[bool]] = []
        if self.run is not None:
            conditions.append(table.c.run == self.run)
        if self.group_id:
            conditions.append(table.c.group_id.in_(self.group_id))
        if self.group_prefix is not None:
            conditions.append(begins_with(table.c.group_id, self.group_prefix))
        return conditions

    def has_group(self, group_id: str | None) -> bool:
        """Is this group one of those that are asked for?"""
        if self.group_id and group_id not in self.group_id:
            return False
        return self.group_prefix is None or (group_id is not None and group_id.startswith(self.group_prefix))


def chosen(wanted: GroupFilter) -> Select[Any]:
    """The sessions whose own run and group these are, and those whose rollout's are."""
    own = select(sessions.c.session_id).where(*wanted.of(sessions))
    if not wanted.of_groups:
        return own
    theirs = (
        select(_below.c.session_id)
        .join_from(_below, _roots, _roots.c.session_id == _below.c.root_id)
        .where(*wanted.of(_roots), _below.c.status != "undone", _roots.c.status != "undone")
    )
    return select(own.union_all(theirs).subquery().c.session_id)


ANY = GroupFilter()
