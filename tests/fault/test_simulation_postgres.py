"""What the simulation finds on PostgreSQL alone: the store's locks, snapshots and repeats, each broken in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.databases import Postgres

from app.store import dialect, postgres_tx, writer
from app.store.log import Appended
from app.store.postgres import PostgresWriter
from app.store.postgres_tx import LastEvent
from tests.tools.simulation.postgres_store import PostgresStore
from tests.tools.simulation.schedule import Simulation

pytestmark = pytest.mark.long

Patch = pytest.MonkeyPatch


@pytest.fixture
def simulation(postgres: Postgres) -> Iterator[Simulation]:
    """Of the test's own, since it keeps statements compiled."""
    with postgres.database(template="template1") as url:
        made = Simulation(PostgresStore(url))
        yield made
        made.close()


def a_reader_reads_to_the_end(patch: Patch) -> None:
    """It passes what a transaction that still runs has written."""
    patch.setattr(dialect.oldest_tx, "postgresql", dialect.next_tx.postgresql)


def a_batch_waits_for_locked_heads(patch: Patch) -> None:
    patch.setattr(writer, "_lock_heads", writer._known.with_for_update())


def what_is_deferred_counts_as_done(patch: Patch) -> None:
    patch.setattr(writer, "DEFERRED", Appended(()))


def a_conflict_of_keys_is_not_tried_again(patch: Patch) -> None:
    patch.setattr(dialect, "_CONFLICTS", frozenset({"40001", "40P01"}))


def a_commit_whose_answer_was_lost_counts_as_done(patch: Patch) -> None:
    patch.setattr(PostgresWriter, "_holds", _yes)


def _yes(self: PostgresWriter, last: LastEvent, connection: object) -> bool:
    return True


def a_commit_whose_answer_was_lost_is_repeated(patch: Patch) -> None:
    patch.setattr(PostgresWriter, "_holds", _no)


def _no(self: PostgresWriter, last: LastEvent, connection: object) -> bool:
    return False


def a_claim_takes_another_version(patch: Patch) -> None:
    condition = "s.version = g.known AND"
    assert condition in postgres_tx.TAKE
    patch.setattr(postgres_tx, "TAKE", postgres_tx.TAKE.replace(condition, ""))


def a_batch_locks_no_heads(patch: Patch) -> None:
    patch.setattr(writer, "_lock_heads", writer._known)


MUTANTS: tuple[tuple[Callable[[Patch], None], int], ...] = (
    (a_reader_reads_to_the_end, 10),
    (a_batch_waits_for_locked_heads, 19),
    (what_is_deferred_counts_as_done, 19),
    (a_conflict_of_keys_is_not_tried_again, 19),
    (a_commit_whose_answer_was_lost_counts_as_done, 119),
    (a_commit_whose_answer_was_lost_is_repeated, 19),
    (a_claim_takes_another_version, 24),
    (a_batch_locks_no_heads, 19),
)
"""Each with the first seed that is tried: one that finds it soon."""


@pytest.mark.parametrize(("mutant", "first"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_is_found(
    simulation: Simulation, mutant: Callable[[Patch], None], first: int, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    assert any(simulation.run(seed).problems for seed in range(first, first + 60))


def test_a_seed_gives_the_same_trace(simulation: Simulation) -> None:
    """Whatever ran before: transactions' ids differ, and are in no trace."""
    first, again = (simulation.run(3, trace=True).trace for _ in range(2))
    assert first == again
    assert len(first) > 30
