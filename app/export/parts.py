"""The rows of a part of an export, made from what was read for it; runs on a thread or in another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice

import msgspec

from app.domain.branches import TEXT_ONLY, Branches, BranchRow, Picker, turns_left_out
from app.domain.groups import UNKNOWN_STALENESS, has_numbers_only, oldest_version, staleness, too_stale
from app.domain.rules import superseded
from app.domain.samples import Segment, Status, Truncate, aged, is_stale
from app.domain.session import Session
from app.export import formats
from app.export.faults import excluded, instead, told
from app.export.lost import Ledger, Missing, sampled_tokens
from app.export.pages import ExportPage, Turns
from app.export.query import Cursor, ExportQuery
from app.export.row import Fields, Row, Unfit
from app.export.rows import Folded, Known, SessionRows, known
from app.export.shapes.tree import SessionTree
from app.store.content import StoredSession
from app.store.selection import GroupFilter

GONE = ("erased", "archived")
"""Statuses of sessions whose content is no longer in the store, which are then the reason that they give no row."""

EVALUATION = "evaluation"
"""A session whose rows are given with `evaluation=true` alone."""

NOTHING_FITS: Mapping[Truncate, str] = {
    "turn": "max_seq_len: no turn fits",
    "token": "max_seq_len: no sampled token fits",
}

Warn = Callable[[str, object], None]
"""Is told the id of a session that cannot be read, and why."""


class PartRows:
    """The rows of an export with this window. `release` is Turnlog's version, for provenance.

    `counts_only`: give the counts of each row instead of the row.
    """

    def __init__(
        self,
        query: ExportQuery,
        window: Cursor,
        release: str,
        branches: Branches | Picker,
        warn: Warn,
        *,
        counts_only: bool = False,
    ) -> None:
        self._query = query
        self._wanted = GroupFilter(**query.run_and_group)
        self._window = window
        self._release = release
        self._branches = branches
        self._warn = warn
        self._counts_only = counts_only or query.explain == "only"

    def plan(self, stored: StoredSession, page: ExportPage) -> tuple[Known | None, Turns]:
        """The session's fold, and the turns whose content its rows need. None where it gives no row, and where it
        cannot be folded: `fields` says why."""
        if stored.status in GONE:
            return None, ()
        try:
            return (found := known(stored)), self._needed(stored, found, page)
        except Exception:  # noqa: BLE001 - `_session` meets it again
            return None, ()

    def _needed(self, stored: StoredSession, session: Known, page: ExportPage) -> Turns:
        if not self._is_asked_for(session) or self._left_out(session, page) is not None:
            return ()
        made = SessionRows(stored, session, self._query, self._branches, self._release)
        segments = [one for one in made.segments if self._excluded(one) is None]
        needed = {turn for one in segments for turn in made.needed(one)}
        # By their numbers they are read a session at a time.
        return None if len(needed) * 2 > len(session.events) else needed

    def fields(self, part: Sequence[ExportPage], read: Mapping[str, Folded]) -> Iterator[Fields]:
        """The pages' rows; with `explain`, exclusions are rows too."""
        window, query = self._window, self._query
        for page in part:
            members = [read[member] for member in page.members if member in read]
            skip = window.given or 0 if page.at == window.at else 0
            if page.is_group:
                rows = iter(self._group(members, page))
            elif formats.takes_sessions(query.shape):
                rows = (row for member in members for row in self._tree(member, page))
            else:
                every = (row for member in members for row in self._session(member, page))
                rows = (self._shaped(row) for row in every)
            for row in islice(rows, skip, None):
                if query.explain if formats.EXCLUDED in row else query.explain != "only":
                    yield row

    def _group(self, members: Sequence[Folded], page: ExportPage) -> list[Fields]:
        """A whole group as one row, and what is excluded from it.

        Part of a group gives no row: only erased and replaced sessions and rolled-back turns may be missing.
        """
        by_member = [list(self._session(member, page)) for member in members]
        rows = [row for of_member in by_member for row in of_member if isinstance(row, Row)]
        left_out = [row for of_member in by_member for row in of_member if not isinstance(row, Row)]
        if not rows:
            return self._numbered(page, None, left_out)
        missing = next(
            filter(
                None,
                (
                    _missing(member.stored, rows)
                    for member, rows in zip(members, by_member, strict=True)
                    if member.stored.session_id not in page.left_out
                ),
            ),
            None,
        )

        def whole(cursor: str) -> Fields:
            if missing is not None:
                reason = f"a session of the group is left out: {missing}"
                return excluded(page.session_id, cursor, reason, lost_tokens=_lost(rows))
            rows[-1] = msgspec.structs.replace(rows[-1], cursor=cursor)
            make = partial(formats.of_group, self._query.shape, rows)
            return self._or_excluded(lambda: self._row_or_counts(make(), rows), page.session_id, cursor, rows)

        return self._numbered(page, whole, left_out)

    def _tree(self, member: Folded, page: ExportPage) -> list[Fields]:
        """A whole session as one row, and what is excluded from it."""
        tree = SessionTree()

        def added(row: Row) -> Fields:
            tree.add(row)
            return {}

        every = (
            self._or_excluded(partial(added, row), row.session.session_id, row.cursor, [row], row.sample.segment)
            if isinstance(row, Row)
            else row
            for row in self._session(member, page)
        )
        left_out = [fields for fields in every if fields]
        return self._numbered(page, partial(self._whole, tree) if len(tree) else None, left_out)

    def _whole(self, tree: SessionTree, cursor: str) -> Fields:
        fields = tree.fields(cursor)
        if not self._counts_only:
            return fields
        tokens, trained = len(fields["tokens"]), int(fields["loss_mask"].sum())
        return {"sessions": [fields["session_id"]], "tokens": tokens, "trained_tokens": trained, "cursor": cursor}

    def _numbered(
        self, page: ExportPage, make: Callable[[str], Fields] | None, left_out: Sequence[Fields]
    ) -> list[Fields]:
        """The row that is made for its cursor, and what is excluded from it."""
        total = (make is not None) + len(left_out) if self._query.explain else 1
        cursors = (self._window.behind(page.at, number, total) for number in count(1))
        made = [] if make is None else [make(next(cursors))]
        return [*made, *({**fields, "cursor": cursor} for fields, cursor in zip(left_out, cursors, strict=False))]

    def _shaped(self, row: Row | Fields) -> Fields:
        if not isinstance(row, Row):
            return row
        return self._or_excluded(
            lambda: self._row_or_counts(formats.of_row(self._query.format, self._query.shape, row), [row]),
            row.session.session_id,
            row.cursor,
            [row],
            row.sample.segment,
        )

    def _row_or_counts(self, fields: Fields, rows: Sequence[Row]) -> Fields:
        if not self._counts_only:
            return fields
        return {
            "sessions": sorted({row.session.session_id for row in rows}),
            "tokens": sum(len(row.sample.tokens) for row in rows),
            "trained_tokens": sum(int(row.sample.loss_mask.sum()) for row in rows),
            "cursor": rows[-1].cursor,
        }

    def _or_excluded(
        self, make: Callable[[], Fields], session_id: str, cursor: str, rows: Sequence[Row], segment: int | None = None
    ) -> Fields:
        """What a shape makes of rows, or why it makes nothing: it cannot hold them, or their content is damaged."""
        try:
            return make()
        except Unfit as error:
            return excluded(session_id, cursor, str(error), segment=segment, lost_tokens=_lost(rows))
        except Exception as error:  # noqa: BLE001 - a session's fault, whatever it is, ends no export
            return self._unreadable(session_id, cursor, error, _lost(rows), segment)

    def _unreadable(
        self, session_id: str, cursor: str, error: Exception, lost_tokens: int | None, segment: int | None = None
    ) -> Fields:
        why = told(error)
        self._warn(session_id, why)
        return excluded(session_id, cursor, f"unreadable: {why}", segment=segment, lost_tokens=lost_tokens)

    def instead(self, shaped: Fields, error: Exception) -> Fields | None:
        """What stands in the place of a row that a container cannot hold."""
        replaced = instead(shaped, error)
        self._warn(str(replaced["session_id"]), told(error))
        return replaced if self._query.explain else None

    def _session(self, read: Folded, page: ExportPage) -> Iterator[Row | Fields]:
        """A session's rows and exclusions; an unreadable session ends with its reason."""
        ledgers: list[Ledger] = []
        try:
            yield from self._readable(read, page, ledgers)
        except Exception as error:  # noqa: BLE001 - as in `_or_excluded`
            lost = ledgers[0].rest() if ledgers else None
            yield self._unreadable(read.stored.session_id, self._window.behind(page.at), error, lost)

    def _is_asked_for(self, session: Known) -> bool:
        """Is it of the requested run, group and name? Others are read only where damage hides what they are."""
        own, wanted = session.session, self._wanted
        if wanted.run not in (None, own.config.of_run) or not any(map(wanted.has_group, session.groups)):
            return False
        return self._query.name in (None, own.name) and self._query.generation in (None, own.generation)

    def _left_out(self, session: Known, page: ExportPage) -> str | None:
        """Why a session gives no row at all."""
        own = session.session
        if own.config.evaluation and not self._query.evaluation:
            return EVALUATION
        reason = page.left_out.get(own.session_id) or session_excluded(session, self._query, self._current(own))
        if reason is None and own.is_text and not formats.takes_text(self._query.format):
            return TEXT_ONLY
        return reason

    def _excluded(self, segment: Segment) -> str | None:
        """Why a segment gives no row, as far as the log says."""
        if self._query.status not in (None, status := self._status(segment)):
            return f"status is {status}"
        if not formats.takes(self._query.format, self._query.shape, segment):
            return "every sampled token is in another session's loss"
        return None

    def _readable(self, read: Folded, page: ExportPage, ledgers: list[Ledger]) -> Iterator[Row | Fields]:
        """A row, or the reason why there is none, for each live segment, then what else takes sampled tokens: of rows,
        and each turn that is not live. With `explain` the session's ledger is put into `ledgers`.

        A session outside the requested run, group or name gives nothing.
        """
        stored = read.stored
        session_id, at = stored.session_id, page.at
        if stored.status in GONE:
            yield excluded(session_id, self._window.behind(at), stored.status)
            return
        session = read.known or known(stored)
        own = session.session
        if not self._is_asked_for(session):
            return
        if (reason := self._left_out(session, page)) is not None:
            lost = sum(sampled_tokens(session).values()) if self._query.explain else None
            yield excluded(session_id, self._window.behind(at), reason, lost_tokens=lost)
            return
        made = SessionRows(stored, session, self._query, self._branches, self._release)
        fitting = {segment.row.leaf.number: segment for segment in made.segments}
        current, most, stale = self._current(own), self._query.max_staleness, self._query.stale
        ledger: Ledger | None = None
        missing: list[Missing] = []
        if self._query.explain:
            ledger = Ledger(session, made, partial(is_stale, current=current, most=most) if stale == "mask" else None)
            ledgers.append(ledger)
            left_out = turns_left_out(own, made.rows, self._query.branches)
            sampled = ledger.sampled
            missing = [Missing(turn.segment, turn.number, why, sampled.get(turn.number, 0)) for turn, why in left_out]
            fits = (row for row in made.rows if row.leaf.number in fitting)
            missing += (one for row in fits for one in ledger.shortened(row))
        total = len(made.rows) + len(missing)
        for nth, row in enumerate(made.rows, 1):
            cursor, number = self._window.behind(at, nth, total), row.leaf.segment
            segment, lose = fitting.get(row.leaf.number), None if ledger is None else partial(ledger.lose, row)
            reason = NOTHING_FITS[self._query.truncate] if segment is None else self._excluded(segment)
            made_row: Row | None = None
            if segment is not None and reason is None:
                try:
                    made_row = made.row(segment, cursor, advantage=page.advantages.get(session_id))
                except Unfit as error:
                    reason = str(error)
            if made_row is None:
                told = f"{reason}{_in_no_loss(own, row, self._query)}"
                yield excluded(session_id, cursor, told, segment=number, lost_tokens=None if lose is None else lose())
                continue
            if stale != "drop":
                sample, age = aged(made_row.sample, current, most, masks=stale == "mask")
                made_row = msgspec.structs.replace(made_row, sample=sample, age=age)
            if ledger is not None:
                ledger.give(row)
                made_row = msgspec.structs.replace(made_row, lose=lose)
            yield made_row
        for nth, (segment_number, turn, why, lost_tokens) in enumerate(missing, len(made.rows) + 1):
            cursor = self._window.behind(at, nth, total)
            yield excluded(session_id, cursor, why, segment=segment_number, turn=turn, lost_tokens=lost_tokens)

    def _current(self, session: Session) -> int | None:
        return self._window.current(self._query, session.config.of_run)

    def _status(self, segment: Segment) -> Status:
        return formats.status_of(self._query.format, self._query.shape, segment)


def _lost(rows: Sequence[Row]) -> int | None:
    """The sampled tokens of rows that are left out; None without `explain`."""
    lost = [row.lose() for row in rows if row.lose is not None]
    return sum(lost) if lost else None


def _in_no_loss(session: Session, row: BranchRow, query: ExportQuery) -> str:
    """Of a row that is left out: the turns that only it has in its loss."""
    if not session.is_tree or not row.in_loss or query.loss == "every":
        return ""
    return f": turns {', '.join(map(str, sorted(row.in_loss)))} are in no loss"


def _missing(member: StoredSession, rows: Sequence[Row | Fields]) -> str | None:
    """The exclusion of a session, because of which its group is incomplete: not that of a judge, whose session of text
    is a child."""
    if member.status == "erased":
        return None
    if not rows:
        return f"{member.session_id}: its log names another group"
    left_out = [row for row in rows if not isinstance(row, Row) and row["turn"] is None]
    if member.root is not None:
        left_out = [row for row in left_out if row[formats.EXCLUDED] != TEXT_ONLY]
    return next((f"{row['session_id']}: {row[formats.EXCLUDED]}" for row in left_out), None)


def session_excluded(known: Known, query: ExportQuery, current: int | None) -> str | None:
    """Why a session of the requested group gives no row at all; `current` is its run's weight version.

    A session with a sampled token of unknown age is excluded, as is one without a reward if a reward is required. So no
    token in an exported row's loss is older than requested, unless the request keeps stale ones.
    """
    session = known.session
    leaf = session.leaf
    if leaf is None:
        return "no committed turn"
    if query.session_status not in (None, session.status):
        return f"session_status is {session.status}"
    committed = known.times[leaf.number]
    if query.since is not None and committed < query.since:
        return "committed before since"
    if query.until is not None and committed > query.until:
        return "committed after until"
    reward = None if session.reward is None else session.reward.reward
    if query.min_reward is not None and (reward is None or reward < query.min_reward):
        return "no reward" if reward is None else "reward below min_reward"
    if query.max_reward is not None and (reward is None or reward > query.max_reward):
        return "no reward" if reward is None else "reward above max_reward"
    gone = superseded(session)
    live = [
        known.events[turn.number]
        for turn in session.turns
        if turn.number not in gone and turn.number > session.context_turns
    ]
    if query.max_staleness is None or query.stale == "keep" or not any(event.output_tokens for event in live):
        return None
    behind = staleness(current, oldest_version(live))
    if behind is None:
        return f"staleness unknown: {UNKNOWN_STALENESS}"
    if not all(map(has_numbers_only, live)):
        return "staleness unknown: a weight version is not a number"
    return too_stale(behind, query.max_staleness) if query.stale == "drop" else None
