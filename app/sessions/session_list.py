"""The list of sessions as people look at it: filtered, in any order, a page at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from app.domain import cursors
from app.domain.events import is_number
from app.domain.groups import staleness
from app.errors import InvalidRequest
from app.store import group_reads, heads_view, survey, survey_lists
from app.store.engine import Database
from app.store.heads_view import COUNTED, HeadFilter, HeadRow, Place, SortOrder
from app.store.reads import Connection

State = Literal["open", "idle", "claimed", "gated", "closed", "erased"]
"""`open` is any of the first three. `claimed`: a turn is in flight. `gated`: this process holds one back at a gate."""

Sort = Literal["created_at", "updated_at", "reward", "turns", "staleness", "claimed_since"]

Held = Callable[[], Mapping[str, bool]]
"""Sessions whose turn waits at a gate of this process; has it a claim?"""

CursorFields = tuple[
    str,
    bool,
    float | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None,
    Annotated[str, msgspec.Meta(pattern=r"^[^\0]*$")],
]
"""The order's column, whether it descends, the last row's value and id: within what the databases take."""

MAX_CLAIMED = 10_000
"""Open turns that are looked at where those are what is asked for: the oldest."""


class SessionRow(msgspec.Struct, frozen=True):
    """A session in a list. `staleness`: by how many weight versions its newest turn is behind the newest there is."""

    session_id: str
    version: int
    state: State
    turns: int
    group_id: str | None
    attempt: int | None
    reward: float | None
    weight_version: int | None
    staleness: int | None
    engine: str | None
    created_at: float
    updated_at: float
    claimed_since: float | None
    closed_at: float | None


class Asked(msgspec.Struct, frozen=True):
    """Which sessions, and in which order; None: any. `stuck_s`: claimed for longer. `q` is how the id begins."""

    state: State | None = None
    group_id: str | None = None
    engine: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    unrewarded: bool = False
    min_staleness: int | None = None
    stuck_s: float | None = None
    q: str | None = None
    sort: Sort = "created_at"
    newest_first: bool = True


class Page(msgspec.Struct, frozen=True):
    """`total`: how many sessions match in all, counted up to 100,000; beyond, `total_is_exact` says no."""

    sessions: Sequence[SessionRow]
    next_cursor: str | None
    total: int
    total_is_exact: bool


class SessionList:
    """`held` are the turns at gates, `engine_versions` the weight versions that engines are known to have."""

    def __init__(
        self,
        database: Database,
        held: Held,
        engine_versions: Callable[[], Sequence[str | None]],
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self.held = held
        self._engine_versions = engine_versions
        self._clock = clock

    async def page(self, asked: Asked, cursor: str | None, limit: int) -> Page:
        """Raises InvalidRequest for a cursor that is not one of these, StoreUnavailable."""
        after = None if cursor is None else _decoded(cursor, asked)
        held = self.held()

        def read(connection: Connection) -> Page:
            newest = self.newest_version(connection)
            if asked.state == "gated" or _needs_claim(asked):
                rows, is_exact = self._few(connection, asked, newest, held)
                total, found = len(rows), _sorted(rows, asked, after)[: limit + 1]
            else:
                wanted = _wanted(asked, newest, held)
                total = heads_view.count(connection, wanted)
                is_exact = total <= COUNTED
                found = _page(connection, wanted, asked, after, limit + 1, many=not is_exact or wanted == HeadFilter())
            shown = found[:limit]
            return Page(
                sessions=[shaped(row, newest, held) for row in shown],
                next_cursor=_encoded(shown[-1], asked) if len(found) > limit else None,
                total=min(total, COUNTED),
                total_is_exact=is_exact,
            )

        def around_damage(connection: Connection) -> Page:
            newest = self.newest_version_of_each(connection)
            found = survey_lists.rows(connection, _wanted(asked, newest, held))
            found = [row for row in found if self._is_claimed_as_asked(row, asked, held)]
            shown = _sorted(found, asked, after)[: limit + 1]
            return Page(
                sessions=[shaped(row, newest, held) for row in shown[:limit]],
                next_cursor=_encoded(shown[limit - 1], asked) if len(shown) > limit else None,
                total=min(len(found), COUNTED),
                total_is_exact=len(found) <= COUNTED,
            )

        return await self._database.read(read, or_else=around_damage)

    def _is_claimed_as_asked(self, row: HeadRow, asked: Asked, held: Mapping[str, bool]) -> bool:
        """What of a question is about turns in flight."""
        if asked.state == "gated" and row.session_id not in held:
            return False
        if not _needs_claim(asked):
            return True
        before = self._clock() - (asked.stuck_s or 0.0)
        return row.claimed_since is not None and row.claimed_since <= before

    def rows_of_each(self, connection: Connection, session_ids: Sequence[str]) -> list[SessionRow]:
        """As `rows`, around damaged pages."""
        newest, held = self.newest_version_of_each(connection), self.held()
        return [shaped(row, newest, held) for row in survey_lists.rows(connection, HeadFilter(), session_ids)]

    def rows(self, connection: Connection, session_ids: Sequence[str]) -> list[SessionRow]:
        """Some sessions as they are now, in no order; for `Database.read`."""
        newest, held = self.newest_version(connection), self.held()
        return [shaped(row, newest, held) for row in heads_view.of(connection, session_ids)]

    def newest_version(self, connection: Connection) -> int | None:
        """The largest weight version that is a number: of any session, or of an engine that no turn has seen yet."""
        return self._newest(group_reads.newest_version(connection))

    def newest_version_of_each(self, connection: Connection) -> int | None:
        """As `newest_version`, around damaged pages."""
        return self._newest(survey.newest_version(connection))

    def _newest(self, sampled: int | None) -> int | None:
        known = [int(one) for one in self._engine_versions() if one is not None and is_number(one)]
        return max(known if sampled is None else [*known, sampled], default=None)

    def _few(
        self, connection: Connection, asked: Asked, newest: int | None, held: Mapping[str, bool]
    ) -> tuple[list[HeadRow], bool]:
        """All that match where only sessions with a turn in flight can, whose ids are known before their heads.

        False where there are too many open turns to look at all of them.
        """
        if _needs_claim(asked):
            before = None if asked.stuck_s is None else self._clock() - asked.stuck_s
            claimed = heads_view.claimed(connection, before, MAX_CLAIMED)
            ids = [one for one in claimed if one in held] if asked.state == "gated" else claimed
            rows = heads_view.of(connection, ids, _wanted(asked, newest, held))
            return [row for row in rows if row.claimed_since is not None], len(claimed) < MAX_CLAIMED
        return heads_view.of(connection, list(held), _wanted(asked, newest, held)), True


def shaped(row: HeadRow, newest: int | None, held: Mapping[str, bool]) -> SessionRow:
    return SessionRow(
        session_id=row.session_id,
        version=row.version,
        state=_state(row, held),
        turns=row.turns,
        group_id=row.group_id,
        attempt=row.attempt,
        reward=row.reward,
        weight_version=row.weight_version,
        staleness=staleness(newest, row.weight_version),
        engine=row.engine,
        created_at=row.created_at,
        updated_at=row.updated_at,
        claimed_since=row.claimed_since,
        closed_at=row.closed_at,
    )


def _state(row: HeadRow, held: Mapping[str, bool]) -> State:
    match row.status:
        case "closed":
            return "closed"
        case "erased":
            return "erased"
        case _:
            if row.session_id in held:
                return "gated"
            return "idle" if row.claimed_since is None else "claimed"


def _needs_claim(asked: Asked) -> bool:
    return asked.state == "claimed" or asked.stuck_s is not None or asked.sort == "claimed_since"


def _wanted(asked: Asked, newest: int | None, held: Mapping[str, bool]) -> HeadFilter:
    most = None
    if asked.min_staleness is not None:
        most = NEVER if newest is None else newest - asked.min_staleness
    is_open = asked.state not in (None, "closed", "erased")
    return HeadFilter(
        status="open" if is_open else asked.state,  # type: ignore[arg-type]
        idle=asked.state == "idle",
        but=held.keys() if asked.state == "idle" else (),
        group_id=asked.group_id,
        engine=asked.engine,
        min_reward=asked.min_reward,
        max_reward=asked.max_reward,
        unrewarded=asked.unrewarded,
        most_version=most,
        begins=asked.q,
    )


NEVER = -1
"""No weight version is so low."""


def _by(asked: Asked) -> tuple[Literal["claimed_since"] | SortOrder, bool]:
    """The column that is sorted by, and whether from the largest value down: the stalest have the lowest version."""
    if asked.sort == "staleness":
        return "weight_version", not asked.newest_first
    return asked.sort, asked.newest_first


def _page(
    connection: Connection, wanted: HeadFilter, asked: Asked, after: Place | None, limit: int, *, many: bool
) -> list[HeadRow]:
    column, descending = _by(asked)
    assert column != "claimed_since"
    return heads_view.page(
        connection, wanted, order=column, newest_first=descending, after=after, limit=limit, many=many
    )


def _sorted(rows: Sequence[HeadRow], asked: Asked, after: Place | None) -> list[HeadRow]:
    """Those behind `after`, in the order in which the store would give them."""
    column, descending = _by(asked)
    places = {(getattr(row, column), row.session_id): row for row in rows}
    valued = sorted((place for place in places if place[0] is not None), reverse=descending)
    others = sorted((place for place in places if place[0] is None), reverse=descending)
    if after is not None and after[0] is not None:
        valued = [place for place in valued if (place < after if descending else place > after)]
    elif after is not None:
        valued = []
        others = [place for place in others if (place[1] < after[1] if descending else place[1] > after[1])]
    return [places[place] for place in (*valued, *others)]


def _encoded(row: HeadRow, asked: Asked) -> str:
    """The place behind a row, and the order in which it is one."""
    column, descending = _by(asked)
    place = (column, descending, getattr(row, column), row.session_id)
    return cursors.encoded(place)


def _decoded(cursor: str, asked: Asked) -> Place:
    """Raises InvalidRequest, also for a cursor of another order."""
    column, descending, value, session_id = cursors.decoded(cursor, CursorFields, "this list")
    if (column, descending) != _by(asked):
        raise InvalidRequest("cursor is of a list in another order")
    return value, session_id
