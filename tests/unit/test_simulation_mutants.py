"""The simulation finds what it is there for: the service's code, broken in one place, fails within a few schedules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.store import event_at
from sqlalchemy import func, select

from app.domain import branches, retention, samples
from app.domain.fleet import Fleet
from app.domain.groups import Outcome
from app.domain.history import RequestHistory
from app.domain.session import Session
from app.errors import AppError
from app.features.checkpoints.checkpoints import Checkpoints
from app.features.gates.gates import Gates
from app.features.gates.pauses import Pauses
from app.features.groups import rules
from app.features.groups.feed import FeedQuery
from app.features.groups.operations import Acknowledge, Acknowledged
from app.features.resume import staging
from app.features.session_control.controls import SessionControls
from app.fleet.state import FleetState
from app.sessions import names
from app.sessions.cache import CacheEntry, SessionCache
from app.store import log_turns, writer
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.fleet import AppendFleet
from app.store.log import Appended, holders_of
from app.store.log_turns import Claim, Commit, Known, Release
from app.store.schema import fleet_events
from app.store.selection import GroupFilter
from app.turn.claims import Claims
from app.turn.in_flight import Claimed, EngineChoice, InFlightTurn
from app.turn.placement import Placement
from app.turn.retries import Retries
from app.turn.turns import Turns
from tests.tools.simulation.client import GaveUp, Wire
from tests.tools.simulation.conditions import Theme, draw_theme
from tests.tools.simulation.schedule import Simulation

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
    ("features", "the_feed_is_of_all_runs", FeedQuery, "of_groups", property(lambda self: GroupFilter())),
    ("features", "the_left_are_counted", rules, "replaced", lambda rollouts: frozenset()),
    ("features", "failures_are_counted", Outcome, "left_out", lambda self, on_failed: None),
    ("features", "evaluations_are_counted", rules, "of_one_kind", list),
    ("streams", "a_name_is_of_all_runs", names, "first_id", lambda run, name: name),
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
def a_commit_is_not_decided_again(patch: Patch) -> None:
    """The events of a tree's turn are those for the state that its process knew."""
    _forges(patch, Commit, lambda tx, commit: msgspec.structs.replace(commit, known=_newest(tx, commit)))


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
    made = [
        (one.theme, one.__name__, one)
        for one in globals().values()
        if isinstance(one, FunctionType) and hasattr(one, "theme")
    ]
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
