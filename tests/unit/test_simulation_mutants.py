"""The simulation finds what it is there for: the service's code, broken in one place, fails within a few schedules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
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


async def nothing(*_: Any) -> None:
    return


def acknowledged(operation: Acknowledge, tx: Tx) -> Acknowledged:
    """It is answered, and not written."""
    return Acknowledged(list(operation.group_ids), [], [], [])


REPLACED: tuple[tuple[Theme, str, Any, str, Any], ...] = (
    ("fights", "a_commit_does_not_wait_for_the_disk", Commit, "durable", False),
    ("fights", "keys_are_forgotten", Retries, "repeated", nothing),
    ("fights", "the_socket_is_not_looked_at", Wire, "is_gone", lambda self: False),
    ("fights", "late_attempts_are_new_requests", Retries, "_absorbing", nothing),
    ("fights", "claims_of_nobody_stay", Claims, "_look_for_lost", nothing),
    ("fights", "the_dead_keep_their_claims", log_turns, "abandon", lambda *_: Appended(())),
    ("fights", "the_cache_is_not_refreshed", SessionCache, "current", SessionCache.get),
    ("fights", "a_gate_holds_nobody", Gates, "is_open", lambda self, turn: True),
    ("fights", "a_turn_waits_with_its_claim", Turns, "_wait_at_gate", nothing),
    ("fights", "a_lease_never_ends", Pauses, "_is_due", lambda self, gate: False),
    ("fights", "a_close_ends_no_name", SessionControls, "session_closed", lambda self, session_id, ended: None),
    ("fights", "retries_are_told_to_come_again", Retries, "joinable", lambda self, entry, flights, turn: None),
    ("streams", "staged_tokens_are_anybodys", staging, "_request_hash", lambda turn, call: ""),
    ("streams", "a_finish_ends_a_name_for_good", Session, "has_next", False),
    ("features", "what_an_open_turn_continues_is_dropped", retention, "_pinned", lambda session, upto: set()),
    ("features", "a_dead_restore_is_left", Checkpoints, "_take_over", nothing),
    ("features", "an_acknowledgement_is_lost", Acknowledge, "apply", acknowledged),
    ("features", "superseded_turns_stay", branches, "superseded", lambda session: set()),
)
"""Mutants that replace one attribute, by the theme of the schedules in which each is looked for."""


def of(theme: Theme) -> Callable[[Any], Mutant]:
    """A mutant that is made by code, and its theme."""

    def marked(mutant: Any) -> Mutant:
        mutant.theme = theme
        return mutant

    return marked


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


@of("fights")
def the_fence_is_not_looked_at(patch: Patch) -> None:
    """A commit or a release ends whatever turn is open, or none."""
    _forges(patch, Commit | Release, lambda tx, operation: _held_by_somebody(tx, operation) or operation)


@of("fights")
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


@of("fights")
def the_cached_version_is_trusted(patch: Patch) -> None:
    """A claim takes the session at whatever version it is."""
    _forges(patch, Claim, lambda tx, claim: msgspec.structs.replace(claim, known=_newest(tx, claim)))


def _newest(tx: Tx, operation: Claim | Commit) -> Known:
    head = tx.one(sql.head, {"sid": operation.session_id})
    last = None if head is None else tx.one(event_at, {"sid": operation.session_id, "place": head[0]})
    return operation.known if head is None or last is None else Known(head[0], last[0], head[4])


@of("fights")
def a_commit_that_failed_counts(patch: Patch) -> None:
    plain = Claims.commit

    async def commit(self: Claims, turn: Claimed, *rest: Any, **options: Any) -> Any:
        with contextlib.suppress(AppError):
            return await plain(self, turn, *rest, **options)
        return SimpleNamespace(turn=turn.opened.turn, finish_reason="stop", left_out=(), given_ids=None)

    patch.setattr(Claims, "commit", commit)


@of("fights")
def any_retry_joins(patch: Patch) -> None:
    """A marked retry joins the turn in flight, whichever request that is of."""
    plain = Retries.joinable

    def joinable(
        self: Retries, entry: CacheEntry, flights: Sequence[InFlightTurn], turn: InFlightTurn
    ) -> InFlightTurn | None:
        is_marked = turn.is_retry and turn.retry_key is None and not entry.session.is_tree
        return flights[0] if is_marked else plain(self, entry, flights, turn)

    patch.setattr(Retries, "joinable", joinable)


@of("fights")
def resets_are_not_seen(patch: Patch) -> None:
    """A reply is delivered once the kernel has it."""
    plain = Retries.record_delivery

    def record_delivery(self: Retries, *of: Any, delivered: bool | None, is_replay: bool) -> None:
        if delivered is not None:
            plain(self, *of, delivered=delivered, is_replay=is_replay)

    patch.setattr(Retries, "record_delivery", record_delivery)


@of("fights")
def a_commit_is_not_decided_again(patch: Patch) -> None:
    """The events of a tree's turn are those for the state that its process knew."""
    _forges(patch, Commit, lambda tx, commit: msgspec.structs.replace(commit, known=_newest(tx, commit)))


@of("fights")
def a_close_leaves_the_turn_open(patch: Patch) -> None:
    def apply(self: Close, tx: Tx) -> Any:
        row = tx.one(sql.close_head, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        rollouts.note(tx, *row)
        return advance_head(tx, self.session_id, self.at, [SessionClosed()])

    patch.setattr(Close, "apply", apply)


@of("fights")
def the_cache_skips_events(patch: Patch) -> None:
    """Events that do not follow are passed over, and the entry is kept."""
    plain = CacheEntry.advance

    def advance(self: CacheEntry, events: Any) -> bool:
        return plain(self, [recorded for recorded in events if recorded.seq == self.session.version + 1]) or True

    patch.setattr(CacheEntry, "advance", advance)


@of("fights")
def a_pause_is_known_where_it_was_ordered(patch: Patch) -> None:
    """What other processes have written to the fleet's log is read when this one writes, and not before."""

    async def refresh(self: FleetState) -> Fleet:
        return self.fleet

    patch.setattr(FleetState, "refresh", refresh)
    patch.setattr(FleetState, "is_fresh", True)


@of("fights")
def an_append_does_not_look(patch: Patch) -> None:
    """An event is written behind whatever is there, though it was decided from something older."""
    plain = AppendFleet.apply

    def apply(self: AppendFleet, tx: Tx) -> Any:
        row = tx.one(select(func.max(fleet_events.c.seq)), {})
        return plain(msgspec.structs.replace(self, expected=(row and row[0]) or 0), tx)

    patch.setattr(AppendFleet, "apply", apply)


@of("streams")
def a_session_moves_without_a_word(patch: Patch) -> None:
    """Only the first binding is written."""
    plain = Placement.binding

    def binding(self: Placement, choice: EngineChoice | None, session: Session, engine: str) -> Any:
        return plain(self, choice, session, engine) if session.affinity is None else None

    patch.setattr(Placement, "binding", binding)


@of("fights")
def the_dead_keep_their_names(patch: Patch) -> None:
    """What a process was opening or closing when it died stays so."""

    def may_be_ended(self: AffinityRow, me: int, in_use: Collection[str]) -> bool:
        return (self.incarnation == me or self.state == "bound") and self.is_due and self.control_id not in in_use

    patch.setattr(AffinityRow, "may_be_ended", may_be_ended)


@of("fights")
def a_name_is_bound_to_nothing(patch: Patch) -> None:
    """A turn goes where it would without its name."""

    async def place(self: ControlledTurn, choice: EngineChoice) -> None:
        await self._acquire(choice.order.first)

    patch.setattr(ControlledTurn, "place", place)


@of("fights")
def an_engine_is_not_told(patch: Patch) -> None:
    """A name is ended in the store alone."""

    async def tell(self: SessionControls, ending: Ending) -> None:
        await self.write_with_retry(EngineTold(ending.control_id, self.incarnation))

    patch.setattr(SessionControls, "close_at_engine", tell)


@of("features")
def a_restore_forgets_a_session(patch: Patch) -> None:
    """Of the sessions that have changed, the first is left as it is."""
    plain = checkpoints.to_restore

    def to_restore(*arguments: Any) -> list[tuple[str, int]]:
        return plain(*arguments)[1:]

    patch.setattr(checkpoints, "to_restore", to_restore)


@of("fights")
def valid_turns_are_refused(patch: Patch) -> None:
    """One in twelve histories that fit is told that it does not."""
    plain, looked = history._join_linear, itertools.count(1)

    def join(*arguments: Any) -> Plan:
        if next(looked) % 12 == 0:
            raise HistoryMismatch.of("the history does not fit")
        return plain(*arguments)

    patch.setattr(history, "_join_linear", join)


@of("fights")
def the_window_is_a_turn_too_wide(patch: Patch) -> None:
    plain = history._refusal

    def refusal(session: Session, request: Any, equal: int, superseded: Sequence[Turn], **follows: bool) -> Any:
        error = plain(session, request, equal, superseded, **follows)
        is_just_outside = len(superseded) == session.config.rollback_window + 1
        return None if isinstance(error, RollbackTooDeep) and is_just_outside else error

    patch.setattr(history, "_refusal", refusal)


@of("fights")
def turns_hang_at_the_root(patch: Patch) -> None:
    """One in five turns of a tree that continue another one begins a conversation."""
    plain, joined = history._join_tree, itertools.count(1)

    def join(*arguments: Any) -> Plan:
        plan = plain(*arguments)
        return Plan(0, 0) if plan.parent and next(joined) % 5 == 0 else plan

    patch.setattr(history, "_join_tree", join)


@of("features")
def turns_in_flight_use_nothing(patch: Patch) -> None:
    """A claim looks at what is committed alone."""
    plain = budget_operations.allowance

    def allowance(budgets: Any, wanted: int | None) -> Any:
        committed = [(limits, msgspec.structs.replace(used, open_turns=0, reserved=0)) for limits, used in budgets]
        return plain(committed, wanted)

    patch.setattr(budget_operations, "allowance", allowance)


@of("streams")
def a_part_ends_a_token_early(patch: Patch) -> None:
    plain = Continuation.parts

    def parts(self: Continuation) -> tuple[Part, ...]:
        whole = plain(self)
        if len(whole) < 2:
            return whole
        first, second, *rest = whole
        return Part(first.engine, 0, first.end - 1), Part(second.engine, first.end - 1, second.end), *rest

    patch.setattr(Continuation, "parts", parts)


@of("streams")
def a_stream_ends_before_its_commit(patch: Patch) -> None:
    plain = ClientStream._send_deltas

    async def send_deltas(self: ClientStream) -> None:
        await plain(self)
        await self.write(b"data: [DONE]\n\n", more=True)

    patch.setattr(ClientStream, "_send_deltas", send_deltas)


@of("streams")
def a_wait_counts_before_it_began(patch: Patch) -> None:
    """Whether a session was finished before a request came is not looked up before the request waits at a gate."""

    async def wait_at_gate(self: Turns, placed: Placed, wait: Callable[[InFlightTurn], Any]) -> None:
        with placed.flight.waiting_at_gate():
            placed.flight.has_waited = True
            await wait(placed.flight)

    patch.setattr(Turns, "_wait_at_gate", wait_at_gate)


@of("features")
def payloads_leave_a_window_early(patch: Patch) -> None:
    plain = retention._behind_window

    def behind_window(session: Session, *rest: Any) -> list[int]:
        shorter = msgspec.structs.replace(session.config, rollback_window=max(session.config.rollback_window - 1, 0))
        return plain(msgspec.structs.replace(session, config=shorter), *rest)

    patch.setattr(retention, "_behind_window", behind_window)


@of("features")
def a_budget_drops_everything(patch: Patch) -> None:
    """Once payloads are over it."""
    plain = retention._over_budget

    def over_budget(session: Session, left: Any, uses: retention.ChunkUses, max_bytes: int | None, pinned: Any) -> Any:
        return plain(session, left, uses, max_bytes and max_bytes - uses.bytes, pinned)

    patch.setattr(retention, "_over_budget", over_budget)


@of("features")
def a_request_joins_the_first_turn_that_fits(patch: Patch) -> None:
    plain = RequestHistory.histories
    patch.setattr(RequestHistory, "histories", lambda self, index: reversed([*plain(self, index)]))


@of("features")
def masks_are_shifted(patch: Patch) -> None:
    plain = samples._mask
    patch.setattr(samples, "_mask", lambda *of: np.roll(plain(*of), 1))


QUICK = {"the_cached_version_is_trusted", "a_commit_that_failed_counts", "any_retry_joins"}
"""Found within a second or two; the others are left to the untimed lane."""

MOST = 80
"""Schedules of a mutant's theme that are tried."""


def _params() -> Iterator[Any]:
    replaced = [(theme, name, partial(_replace, *attribute)) for theme, name, *attribute in REPLACED]
    made = [(one.theme, one.__name__, one) for one in globals().values() if hasattr(one, "theme")]
    for theme, name, mutant in (*replaced, *made):
        yield pytest.param(theme, mutant, marks=() if name in QUICK else (pytest.mark.untimed,), id=name)


def _replace(owner: Any, name: str, value: Any, patch: Patch) -> None:
    patch.setattr(owner, name, value)


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
