"""The list of sessions, by pages, filtered and sorted: for clients, the command line and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from app.domain import cursors, patterns
from app.domain.groups import staleness
from app.domain.selection import Selection
from app.errors import InvalidRequest
from app.fleet.engines import Engines
from app.sessions.as_reply import as_reply
from app.store.content import matches
from app.store.database import Database
from app.store.ports import Connection
from app.store.sessions import (
    COUNTED,
    HeadFilter,
    HeadRow,
    Place,
    SortOrder,
    Status,
    count_heads,
    list_heads,
    load_heads,
    newest_version,
    newest_versions,
)
from turnlog.parameters import SessionState
from turnlog.replies import ListedSession, SessionPage

Text = Annotated[str | None, Field(max_length=512, pattern=patterns.NO_NUL)]
Number = Annotated[float | None, Field(allow_inf_nan=False)]


class SessionConditions(Selection):
    """Conditions on a session's row; None: any."""

    status: Status | None = Field(default=None, description="Only sessions with this status.")
    attempt: int | None = Field(default=None, ge=0, le=2**31 - 1, description="Only sessions with this attempt number.")
    engine: Text = Field(default=None, description="Only sessions that are bound to this engine.")
    min_reward: Number = Field(default=None, description="Only sessions with at least this reward.")
    max_reward: Number = Field(default=None, description="Only sessions with at most this reward.")
    unrewarded: bool = Field(default=False, description="Only sessions without a reward.")
    min_staleness: int | None = Field(
        default=None,
        ge=0,
        le=2**62,
        description="Only sessions whose newest weight version is at least this many versions behind their run's.",
    )
    tag: str | None = Field(default=None, pattern=patterns.TAG, description="Only sessions with this tag.")
    annotated: str | None = Field(
        default=None,
        pattern=patterns.ANNOTATION,
        description="Only sessions with an annotation of their own of this name.",
    )
    unannotated: str | None = Field(
        default=None,
        pattern=patterns.ANNOTATION,
        description="Only open and closed sessions without an annotation of this name.",
    )
    name: str | None = Field(default=None, pattern=patterns.ID, description="Only sessions with this name.")
    generation: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Only this generation of the name.")
    evaluation: bool | None = Field(default=None, description="Only evaluations, or only others.")
    min_engine_errors: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Only sessions with at least this many engine errors."
    )
    min_tool_errors: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Only sessions with at least this many tool errors."
    )

    def of_heads(self, engines: Engines) -> HeadFilter:
        """`engines` know their weight versions."""
        given = {name: getattr(self, name) for name in _OF_HEADS}
        if self.min_staleness is not None:
            given |= {"least_staleness": self.min_staleness, "engine_versions": engines.newest_versions()}
        return HeadFilter(**given, **self.run_and_group)


_OF_HEADS = (SessionConditions.model_fields.keys() & set(HeadFilter.__struct_fields__)) - Selection.model_fields.keys()

Sort = Literal[
    "created_at", "updated_at", "reward", "turns", "engine_errors", "tool_errors", "staleness", "running_since"
]

MAX_LOOKED_AT = 10_000
"""The most sessions whose metadata one request reads; the page that ends there may be short."""

METADATA_AT_ONCE = 500

AtGates = Callable[[], Mapping[str, bool]]
"""Sessions whose turn waits at a gate of this process; True if the turn has its claim."""

CursorFields = tuple[
    str, bool, float | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None, cursors.Text, str
]
"""A cursor: the sort column, whether it descends, the last row's value and id, within what the databases accept, and
the mark of its filters."""

MAX_SECONDS = 10 * 365 * 86_400


class SessionFilter(SessionConditions):
    """Filters and order of a list; None: no filter."""

    state: SessionState | None = Field(
        default=None, description="Only sessions in this state: a status, or what an open session is doing."
    )
    stuck_s: float | None = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="Only sessions with a turn in flight for longer than this many seconds.",
    )
    sort: Sort = Field(default="created_at", description="The column by which the list is sorted.")
    order: Literal["desc", "asc"] = Field(default="desc", description="Descending or ascending.")

    @model_validator(mode="after")
    def _one_state(self) -> SessionFilter:
        if self.status is not None and self.state is not None:
            raise ValueError("status and state exclude each other")
        return self


class SessionQuery(SessionFilter):
    """As the page asks."""

    q: str | None = Field(default=None, pattern=patterns.ID, description="Only sessions whose id begins with this.")

    @property
    def mark(self) -> str:
        """Of the filters, in a cursor."""
        return cursors.mark(self, SessionQuery.model_fields.keys() - {"sort", "order"})


class SessionList:
    """`at_gates` returns the turns that wait at gates; `engines` know their weight versions."""

    def __init__(self, database: Database, at_gates: AtGates, engines: Engines, clock: Callable[[], float]) -> None:
        self._database = database
        self.at_gates = at_gates
        self._engines = engines
        self._clock = clock

    async def page(self, query: SessionQuery, cursor: str | None, limit: int, *, counted: bool = True) -> SessionPage:
        """One page; both totals only with `counted`. With a metadata filter they are those of this page, which may
        have fewer rows than `limit` though others follow.

        Raises InvalidRequest for an invalid cursor, StoreUnavailable.
        """
        if not query.metadata:
            return await self._page(query, cursor, limit, counted=counted)
        rows: list[ListedSession] = []
        after = cursor
        for _ in range(MAX_LOOKED_AT // METADATA_AT_ONCE):
            page = await self._page(query, after, METADATA_AT_ONCE, counted=False)
            ids = [row["session_id"] for row in page["sessions"] if row["state"] != "erased"]
            matching = await self._database.read(lambda c: matches(c, ids, query.metadata))  # noqa: B023
            rows += [row for row in page["sessions"] if matching.get(row["session_id"])]
            after = page["next_cursor"]
            if after is None or len(rows) >= limit:
                break
        if len(rows) > limit:
            after = _cursor_behind(rows[limit - 1], query)
        rows = rows[:limit]
        found: SessionPage = {"sessions": rows, "next_cursor": after}
        if counted:
            found |= {"total": len(rows), "total_is_exact": cursor is None and after is None}
        return found

    async def _page(self, query: SessionQuery, cursor: str | None, limit: int, *, counted: bool) -> SessionPage:
        after = None if cursor is None else _place_of(cursor, query)
        order, descending = _order_of(query)
        at_gates = self.at_gates()

        def read(connection: Connection) -> SessionPage:
            wanted = self._wanted(query, at_gates)
            total = count_heads(connection, wanted) if counted else COUNTED + 1
            is_of_few = total <= COUNTED or wanted.claimed_before is not None or wanted.among is not None
            heads = list_heads(
                connection,
                wanted,
                order=order,
                newest_first=descending,
                after=after,
                limit=limit + 1,
                many=wanted == HeadFilter() or not is_of_few,
            )
            newest = self.newest_versions(connection, [head.run for head in heads])
            rows = [session_row(head, newest, at_gates) for head in heads[:limit]]
            page: SessionPage = {
                "sessions": rows,
                "next_cursor": _cursor_behind(rows[limit - 1], query) if len(heads) > limit else None,
            }
            if counted:
                page |= {"total": min(total, COUNTED), "total_is_exact": total <= COUNTED}
            return page

        return await self._database.read(read)

    def _wanted(self, query: SessionQuery, at_gates: Mapping[str, bool]) -> HeadFilter:
        is_open = query.state not in (None, "closed", "erased", "undone")
        status: Any = "open" if is_open else query.status or query.state
        is_idle, is_running = query.state == "idle", query.state == "running"
        needs_claim = is_running or query.stuck_s is not None or query.sort == "running_since"
        return msgspec.structs.replace(
            query.of_heads(self._engines),
            status=status,
            idle=is_idle,
            claimed_before=self._clock() - (query.stuck_s or 0.0) if needs_claim else None,
            among=at_gates.keys() if query.state == "paused" else None,
            but=at_gates.keys() if is_idle or is_running else (),
            begins=query.q,
        )

    def rows(
        self, connection: Connection, session_ids: Sequence[str], at_gates: Mapping[str, bool]
    ) -> list[ListedSession]:
        """The rows of these sessions, in no order; for `Database.read`, whose thread must not ask for `at_gates`."""
        heads = load_heads(connection, session_ids)
        newest = self.newest_versions(connection, [head.run for head in heads])
        return [session_row(head, newest, at_gates) for head in heads]

    def newest_versions(self, connection: Connection, runs: Iterable[str]) -> dict[str, int]:
        """By run, the largest numeric weight version of its sessions and of the engines that serve it."""
        runs, engines = set(runs), self._engines.newest_versions()
        found = newest_versions(connection, runs)
        for run in runs:
            if (version := engines.of(run)) is not None:
                found[run] = max(version, found.get(run, version))
        return found

    def newest_version(self, connection: Connection) -> int | None:
        """The largest numeric weight version of any session or engine."""
        of_engines = self._engines.newest_versions()
        known = (newest_version(connection), of_engines.shared, *of_engines.own.values())
        return max((version for version in known if version is not None), default=None)


def session_row(head: HeadRow, newest: Mapping[str, int], at_gates: Mapping[str, bool]) -> ListedSession:
    """`running_since`: since when it is `running`. `staleness`: how many weight versions its newest turn is behind the
    newest one of its run."""
    is_at_gate, is_running = head.session_id in at_gates, head.running_since is not None
    state = state_of(head.status, is_at_gate=is_at_gate, is_running=is_running)
    return as_reply(ListedSession, head, state=state, staleness=staleness(newest.get(head.run), head.weight_version))


def state_of(status: Status, *, is_at_gate: bool, is_running: bool) -> SessionState:
    """The status, or what an open session is doing."""
    if status != "open":
        return status
    return "paused" if is_at_gate else "running" if is_running else "idle"


def _order_of(query: SessionQuery) -> tuple[SortOrder, bool]:
    """The sort column, and whether it descends: the stalest sessions have the lowest version."""
    if query.sort == "staleness":
        return "weight_version", query.order == "asc"
    return query.sort, query.order == "desc"


def _cursor_behind(row: ListedSession, query: SessionQuery) -> str:
    """The cursor after a row in this order."""
    column, descending = _order_of(query)
    place = (column, descending, row[column], row["session_id"], query.mark)
    return cursors.encode(place)


def _place_of(cursor: str, query: SessionQuery) -> Place:
    """Raises InvalidRequest for an invalid cursor, or one of other filters or another order."""
    column, descending, value, session_id, mark = cursors.decode(cursor, CursorFields, "this list")
    cursors.require_mark(mark, query.mark)
    if (column, descending) != _order_of(query):
        raise InvalidRequest("the cursor belongs to a list in another order: start again without it")
    return value, session_id
