"""The simulation finds what it is there for: the service's code, broken in one place, fails within a few schedules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.store import event_at
from sqlalchemy import func, insert, select, update

from app.api.client_stream import ClientStream
from app.domain import branches, history, retention, samples
from app.domain.events import SessionClosed
from app.domain.fleet import Fleet
from app.domain.history import RequestHistory
from app.domain.rules import Plan
from app.domain.session import Session, Turn
from app.errors import AppError, HistoryMismatch, RollbackTooDeep
from app.features.budgets import operations as budget_operations
from app.features.checkpoints import operations as checkpoints
from app.features.checkpoints.checkpoints import Checkpoints
from app.features.gates.gates import Gates
from app.features.gates.pauses import Pauses
from app.features.groups.operations import Acknowledge, Acknowledged
from app.features.resume import staging
from app.features.resume.continuation import Continuation
from app.features.session_control.affinities import AffinityRow, Ending, EngineTold
from app.features.session_control.controls import ControlledTurn, SessionControls
from app.fleet.state import FleetState
from app.sessions.cache import CacheEntry, SessionCache
from app.store import log_turns, rollouts, writer
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.fleet import AppendFleet
from app.store.log import Appended, advance_head, holders_of, refused
from app.store.log_sessions import Close
from app.store.log_turns import Claim, Commit, Known, Release
from app.store.schema import fleet_events, open_turns, sessions
from app.turn.claims import Claims
from app.turn.in_flight import Claimed, EngineChoice, InFlightTurn, Placed
from app.turn.placement import Placement
from app.turn.retries import Retries
from app.turn.turns import Turns
from tests.tools.simulation.client import GaveUp, Wire
from tests.tools.simulation.conditions import Theme, draw_theme
from tests.tools.simulation.schedule import Simulation
from workers.reply import Part

pytestmark = pytest.mark.long

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def _forges(patch: Patch, kinds: Any, changed: Callable[[Tx, Any], Any]) -> None:
    """Operations of these kinds are applied as `changed` makes them."""
    plain = writer.apply_all

    def apply_all(tx: Tx, operations: Sequence[Any]) -> list[Any]:
        return plain(tx, [changed(tx, one) if isinstance(one, kinds) else one for one in operations])

    patch.setattr(writer, "apply_all", apply_all)


def _held_by_somebody(tx: Tx, operation: Commit | Release) -> Commit | Release | None:
    """The operation as its session's open turn would do it."""
    for one in holders_of(tx, operation.session_id):
        held = {"fence": one.fence, "incarnation": one.incarnation, "opened_at": one.opened_at}
        return msgspec.structs.replace(operation, **held)
    return None


def the_fence_is_not_looked_at(patch: Patch) -> None:
    """A commit or a release ends whatever turn is open, or none."""
    _forges(patch, Commit | Release, lambda tx, operation: _held_by_somebody(tx, operation) or operation)


def the_claim_goes_before_the_commit(patch: Patch) -> None:
    """The claim is let go of as soon as the engine has answered, and the commit does without."""
    plain = Claims.commit

    async def commit(self: Claims, turn: Claimed, *rest: Any, **options: Any) -> Any:
        await self.abandon(turn, "not_released")
        return await plain(self, turn, *rest, **options)

    patch.setattr(Claims, "commit", commit)
    _forges(patch, Commit, _claimed_again)


_insert_open_turn = insert(open_turns)


def _claimed_again(tx: Tx, operation: Commit) -> Commit:
    if tx.one(sql.holds_open_turn, operation.held) is None:
        row = {
            "session_id": operation.session_id,
            "fence": operation.fence,
            "turn": operation.turn.turn,
            "parent_turn": operation.turn.parent,
            "incarnation": operation.incarnation,
            "body_hash": operation.turn.body_hash,
            "opened_at": operation.opened_at,
        }
        tx.insert(_insert_open_turn, [row])
        tx.run(update(sessions).values(open_turns=sessions.c.open_turns + 1), {})
    return operation


def the_cached_version_is_trusted(patch: Patch) -> None:
    """A claim takes the session at whatever version it is."""
    _forges(patch, Claim, lambda tx, claim: msgspec.structs.replace(claim, known=_newest(tx, claim)))


def _newest(tx: Tx, operation: Claim | Commit) -> Known:
    head = tx.one(sql.head, {"sid": operation.session_id})
    last = None if head is None else tx.one(event_at, {"sid": operation.session_id, "place": head[0]})
    return operation.known if head is None or last is None else Known(head[0], last[0], head[4])


def a_commit_does_not_wait_for_the_disk(patch: Patch) -> None:
    patch.setattr(Commit, "durable", False)


def a_commit_that_failed_counts(patch: Patch) -> None:
    plain = Claims.commit

    async def commit(self: Claims, turn: Claimed, *rest: Any, **options: Any) -> Any:
        with contextlib.suppress(AppError):
            return await plain(self, turn, *rest, **options)
        return SimpleNamespace(turn=turn.opened.turn, finish_reason="stop", left_out=(), given_ids=None)

    patch.setattr(Claims, "commit", commit)


def keys_are_forgotten(patch: Patch) -> None:
    """A retry is not known again once its turn has been committed."""

    async def repeated(self: Retries, entry: CacheEntry, placed: Placed) -> None:
        return None

    patch.setattr(Retries, "repeated", repeated)


def any_retry_joins(patch: Patch) -> None:
    """A marked retry joins the turn in flight, whichever request that is of."""
    plain = Retries.joinable

    def joinable(
        self: Retries, entry: CacheEntry, flights: Sequence[InFlightTurn], turn: InFlightTurn
    ) -> InFlightTurn | None:
        is_marked = turn.is_retry and turn.retry_key is None and not entry.session.is_tree
        return flights[0] if is_marked else plain(self, entry, flights, turn)

    patch.setattr(Retries, "joinable", joinable)


def the_socket_is_not_looked_at(patch: Patch) -> None:
    """That a client has gone is known only once its connection's end has been read."""
    patch.setattr(Wire, "is_gone", lambda self: False)


def late_attempts_are_new_requests(patch: Patch) -> None:
    """An attempt that comes behind its retry's commit generates."""

    async def absorbing(self: Retries, entry: CacheEntry, placed: Placed) -> None:
        return None

    patch.setattr(Retries, "_absorbing", absorbing)


def resets_are_not_seen(patch: Patch) -> None:
    """A reply is delivered once the kernel has it."""
    plain = Retries.record_delivery

    def record_delivery(self: Retries, *of: Any, delivered: bool | None, is_replay: bool) -> None:
        if delivered is not None:
            plain(self, *of, delivered=delivered, is_replay=is_replay)

    patch.setattr(Retries, "record_delivery", record_delivery)


def a_commit_is_not_decided_again(patch: Patch) -> None:
    """The events of a tree's turn are those for the state that its process knew."""
    _forges(patch, Commit, lambda tx, commit: msgspec.structs.replace(commit, known=_newest(tx, commit)))


def claims_of_nobody_stay(patch: Patch) -> None:
    """Claims whose answers were lost are not looked for."""

    async def nothing(self: Claims) -> None:
        return

    patch.setattr(Claims, "_look_for_lost", nothing)


def what_an_open_turn_continues_is_dropped(patch: Patch) -> None:
    patch.setattr(retention, "_pinned", lambda session, upto: set())


def a_close_leaves_the_turn_open(patch: Patch) -> None:
    def apply(self: Close, tx: Tx) -> Any:
        row = tx.one(sql.close_head, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        rollouts.note(tx, *row)
        return advance_head(tx, self.session_id, self.at, [SessionClosed()])

    patch.setattr(Close, "apply", apply)


def the_dead_keep_their_claims(patch: Patch) -> None:
    patch.setattr(log_turns, "abandon", lambda tx, session_id, at, holders, reason: Appended(()))


def the_cache_is_not_refreshed(patch: Patch) -> None:
    """What other processes have written is not read."""
    patch.setattr(SessionCache, "current", SessionCache.get)


def the_cache_skips_events(patch: Patch) -> None:
    """Events that do not follow are passed over, and the entry is kept."""
    plain = CacheEntry.advance

    def advance(self: CacheEntry, events: Any) -> bool:
        return plain(self, [recorded for recorded in events if recorded.seq == self.session.version + 1]) or True

    patch.setattr(CacheEntry, "advance", advance)


def a_gate_holds_nobody(patch: Patch) -> None:
    patch.setattr(Gates, "is_open", lambda self, turn: True)


def a_turn_waits_with_its_claim(patch: Patch) -> None:
    """The gate is looked at behind the claim alone."""

    async def pass_by(self: Turns, *arguments: Any) -> None:
        return

    patch.setattr(Turns, "_wait_at_gate", pass_by)


def a_pause_is_known_where_it_was_ordered(patch: Patch) -> None:
    """What other processes have written to the fleet's log is read when this one writes, and not before."""

    async def refresh(self: FleetState) -> Fleet:
        return self.fleet

    patch.setattr(FleetState, "refresh", refresh)
    patch.setattr(FleetState, "is_fresh", True)


def an_append_does_not_look(patch: Patch) -> None:
    """An event is written behind whatever is there, though it was decided from something older."""
    plain = AppendFleet.apply

    def apply(self: AppendFleet, tx: Tx) -> Any:
        row = tx.one(select(func.max(fleet_events.c.seq)), {})
        return plain(msgspec.structs.replace(self, expected=(row and row[0]) or 0), tx)

    patch.setattr(AppendFleet, "apply", apply)


def a_lease_never_ends(patch: Patch) -> None:
    patch.setattr(Pauses, "_is_due", lambda self, gate: False)


def a_session_moves_without_a_word(patch: Patch) -> None:
    """Only the first binding is written."""
    plain = Placement.binding

    def binding(self: Placement, choice: EngineChoice | None, session: Session, engine: str) -> Any:
        return plain(self, choice, session, engine) if session.affinity is None else None

    patch.setattr(Placement, "binding", binding)


def a_close_ends_no_name(patch: Patch) -> None:
    """Nobody tells session control that a session was closed."""
    patch.setattr(SessionControls, "session_closed", lambda self, session_id, ended: None)


def the_dead_keep_their_names(patch: Patch) -> None:
    """What a process was opening or closing when it died stays so."""

    def may_be_ended(self: AffinityRow, me: int, in_use: Collection[str]) -> bool:
        return (self.incarnation == me or self.state == "bound") and self.is_due and self.control_id not in in_use

    patch.setattr(AffinityRow, "may_be_ended", may_be_ended)


def a_name_is_bound_to_nothing(patch: Patch) -> None:
    """A turn goes where it would without its name."""

    async def place(self: ControlledTurn, choice: EngineChoice) -> None:
        await self._acquire(choice.order.first)

    patch.setattr(ControlledTurn, "place", place)


def an_engine_is_not_told(patch: Patch) -> None:
    """A name is ended in the store alone."""

    async def tell(self: SessionControls, ending: Ending) -> None:
        await self.write_with_retry(EngineTold(ending.control_id, self.incarnation))

    patch.setattr(SessionControls, "close_at_engine", tell)


def a_dead_restore_is_left(patch: Patch) -> None:
    """Who finds the turns held by a dead process leaves them so."""

    async def take_over(self: Checkpoints) -> None:
        return

    patch.setattr(Checkpoints, "_take_over", take_over)


def a_restore_forgets_a_session(patch: Patch) -> None:
    """Of the sessions that have changed, the first is left as it is."""
    plain = checkpoints.to_restore

    def to_restore(*arguments: Any) -> list[tuple[str, int]]:
        return plain(*arguments)[1:]

    patch.setattr(checkpoints, "to_restore", to_restore)


def valid_turns_are_refused(patch: Patch) -> None:
    """One in twelve histories that fit is told that it does not."""
    plain, looked = history._join_linear, itertools.count(1)

    def join(*arguments: Any) -> Plan:
        if next(looked) % 12 == 0:
            raise HistoryMismatch.of("the history does not fit")
        return plain(*arguments)

    patch.setattr(history, "_join_linear", join)


def the_window_is_a_turn_too_wide(patch: Patch) -> None:
    plain = history._refusal

    def refusal(session: Session, request: Any, equal: int, superseded: Sequence[Turn], **follows: bool) -> Any:
        error = plain(session, request, equal, superseded, **follows)
        is_just_outside = len(superseded) == session.config.rollback_window + 1
        return None if isinstance(error, RollbackTooDeep) and is_just_outside else error

    patch.setattr(history, "_refusal", refusal)


def retries_are_told_to_come_again(patch: Patch) -> None:
    """A retry does not join the turn in flight."""
    patch.setattr(Retries, "joinable", lambda self, entry, flights, turn: None)


def turns_hang_at_the_root(patch: Patch) -> None:
    """One in five turns of a tree that continue another one begins a conversation."""
    plain, joined = history._join_tree, itertools.count(1)

    def join(*arguments: Any) -> Plan:
        plan = plain(*arguments)
        return Plan(0, 0) if plan.parent and next(joined) % 5 == 0 else plan

    patch.setattr(history, "_join_tree", join)


def turns_in_flight_use_nothing(patch: Patch) -> None:
    """A claim looks at what is committed alone."""
    plain = budget_operations.allowance

    def allowance(budgets: Any, wanted: int | None) -> Any:
        committed = [(limits, msgspec.structs.replace(used, open_turns=0, reserved=0)) for limits, used in budgets]
        return plain(committed, wanted)

    patch.setattr(budget_operations, "allowance", allowance)


def an_acknowledgement_is_lost(patch: Patch) -> None:
    """It is answered, and not written."""
    patch.setattr(Acknowledge, "apply", lambda self, tx: Acknowledged(list(self.group_ids), [], [], []))


def staged_tokens_are_anybodys(patch: Patch) -> None:
    """A turn goes on from what any request has left in its session."""
    patch.setattr(staging, "_request_hash", lambda turn: "")


def a_part_ends_a_token_early(patch: Patch) -> None:
    plain = Continuation.parts

    def parts(self: Continuation) -> tuple[Part, ...]:
        whole = plain(self)
        if len(whole) < 2:
            return whole
        first, second, *rest = whole
        return Part(first.engine, 0, first.end - 1), Part(second.engine, first.end - 1, second.end), *rest

    patch.setattr(Continuation, "parts", parts)


def a_stream_ends_before_its_commit(patch: Patch) -> None:
    plain = ClientStream._send_deltas

    async def send_deltas(self: ClientStream) -> None:
        await plain(self)
        await self.write(b"data: [DONE]\n\n", more=True)

    patch.setattr(ClientStream, "_send_deltas", send_deltas)


def a_finish_ends_a_name_for_good(patch: Patch) -> None:
    patch.setattr(Session, "has_next", False)


def a_wait_counts_before_it_began(patch: Patch) -> None:
    """Whether a session was finished before a request came is not looked up before the request waits at a gate."""

    async def wait_at_gate(self: Turns, placed: Placed, wait: Callable[[InFlightTurn], Any]) -> None:
        with placed.flight.waiting_at_gate():
            placed.flight.has_waited = True
            await wait(placed.flight)

    patch.setattr(Turns, "_wait_at_gate", wait_at_gate)


def payloads_leave_a_window_early(patch: Patch) -> None:
    plain = retention._behind_window

    def behind_window(session: Session, *rest: Any) -> list[int]:
        shorter = msgspec.structs.replace(session.config, rollback_window=max(session.config.rollback_window - 1, 0))
        return plain(msgspec.structs.replace(session, config=shorter), *rest)

    patch.setattr(retention, "_behind_window", behind_window)


def a_budget_drops_everything(patch: Patch) -> None:
    """Once payloads are over it."""
    plain = retention._over_budget

    def over_budget(session: Session, left: Any, uses: retention.ChunkUses, max_bytes: int | None, pinned: Any) -> Any:
        return plain(session, left, uses, max_bytes and max_bytes - uses.bytes, pinned)

    patch.setattr(retention, "_over_budget", over_budget)


def a_request_joins_the_first_turn_that_fits(patch: Patch) -> None:
    plain = RequestHistory.histories
    patch.setattr(RequestHistory, "histories", lambda self, index: reversed([*plain(self, index)]))


def masks_are_shifted(patch: Patch) -> None:
    plain = samples._mask
    patch.setattr(samples, "_mask", lambda *of: np.roll(plain(*of), 1))


def superseded_turns_stay(patch: Patch) -> None:
    patch.setattr(branches, "superseded", lambda session: set())


MUTANTS: Mapping[Theme, tuple[Mutant, ...]] = {
    "fights": (
        the_cached_version_is_trusted,
        a_commit_that_failed_counts,
        any_retry_joins,
        the_socket_is_not_looked_at,
        late_attempts_are_new_requests,
        resets_are_not_seen,
        a_commit_is_not_decided_again,
        claims_of_nobody_stay,
        the_dead_keep_their_claims,
        the_cache_skips_events,
        the_cache_is_not_refreshed,
        a_close_leaves_the_turn_open,
        keys_are_forgotten,
        the_fence_is_not_looked_at,
        the_claim_goes_before_the_commit,
        a_commit_does_not_wait_for_the_disk,
        an_append_does_not_look,
        a_gate_holds_nobody,
        a_turn_waits_with_its_claim,
        a_pause_is_known_where_it_was_ordered,
        a_lease_never_ends,
        a_close_ends_no_name,
        the_dead_keep_their_names,
        a_name_is_bound_to_nothing,
        an_engine_is_not_told,
        valid_turns_are_refused,
        the_window_is_a_turn_too_wide,
        retries_are_told_to_come_again,
        turns_hang_at_the_root,
    ),
    "streams": (
        a_session_moves_without_a_word,
        staged_tokens_are_anybodys,
        a_part_ends_a_token_early,
        a_stream_ends_before_its_commit,
        a_finish_ends_a_name_for_good,
        a_wait_counts_before_it_began,
    ),
    "features": (
        what_an_open_turn_continues_is_dropped,
        a_dead_restore_is_left,
        a_restore_forgets_a_session,
        turns_in_flight_use_nothing,
        an_acknowledgement_is_lost,
        payloads_leave_a_window_early,
        a_budget_drops_everything,
        a_request_joins_the_first_turn_that_fits,
        masks_are_shifted,
        superseded_turns_stay,
    ),
}
"""By the theme of the schedules in which each is looked for."""

QUICK = {the_cached_version_is_trusted, a_commit_that_failed_counts, any_retry_joins}
"""Found within a second or two; the others are left to the untimed lane."""

MOST = 80
"""Schedules of a mutant's theme that are tried."""


def _params() -> Iterator[Any]:
    for theme, mutants in MUTANTS.items():
        for mutant in mutants:
            marks = () if mutant in QUICK else (pytest.mark.untimed,)
            yield pytest.param(theme, mutant, marks=marks, id=mutant.__name__)


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    made = Simulation()
    yield made
    made.close()


@pytest.mark.parametrize(("theme", "mutant"), [*_params()])
def test_a_mutant_is_found(simulation: Simulation, theme: Theme, mutant: Mutant, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    seeds = (seed for seed in itertools.count(1) if draw_theme(seed) == theme)
    assert any(_fails(simulation, seed) for seed in itertools.islice(seeds, MOST))


def _fails(simulation: Simulation, seed: int) -> bool:
    try:
        return bool(simulation.run(seed).problems)
    except (AppError, GaveUp):  # A drill was refused what it may have, or not told what became of it.
        return True
