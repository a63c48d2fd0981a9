"""What the fields of a claim, a commit and a freeing are for: the shortest schedule that goes wrong without each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from helpers.log import BODY, opened, payload
from helpers.store import LEASE_S, commit, create, release, reward, stage
from sqlalchemy import bindparam, insert, select, update

from app.domain.control import Action, SessionControl
from app.domain.events import (
    BlobsTombstoned,
    Event,
    LimitReached,
    Limits,
    RolloutJoined,
    SessionFinished,
    SessionRestored,
    TurnOpened,
)
from app.features.budgets.operations import Budget, BudgetClaim, BudgetCommit, EndAtLimit
from app.features.checkpoints.schema import checkpoint_sessions, checkpoints
from app.features.resume.schema import staged_tokens as staged_tokens_table
from app.features.resume.staged_tokens import StagedRow, StageTokens, TakeOverStaged
from app.features.session_control.affinities import Use, Used
from app.store import incarnations
from app.store.dialect import Tx
from app.store.log import Appended, BaseOperation, Refused, StoredChunk, advance_head
from app.store.log_sessions import Close, Erase, FreeChunks, FreeReplay, SaveSnapshot
from app.store.log_turns import (
    AbandonLost,
    AbsorbAttempt,
    Busy,
    Claim,
    Known,
    Limited,
    Pinned,
    Stale,
)
from app.store.schema import chunks, sessions, snapshots
from app.store.writer import apply_all
from tests.tools.simulation.service import register
from tests.tools.simulation.store import MemoryStore

KEY = "k" * 32
ROW = StagedRow(0, 0, "http://engine", None, None, b"text")
CHUNK = StoredChunk(0, "routed_experts", 4, "h" * 64, b"rows")
FREED = BlobsTombstoned((1,), ((2, 0),))

_bytes = select(chunks.c.data).where(chunks.c.session_id == bindparam("sid"))


class Shared:
    """A store that processes 1 and 2 share. Session `s` was created at 1.0, and is on disk."""

    def __init__(self, memory: MemoryStore) -> None:
        self._memory = memory
        memory.restart(lambda: 100.0)
        self.alter(lambda tx: [register(tx, name, alone=False) for name in ("p1", "p2")])
        self.do(create("s"))

    def alter(self, work: Callable[[Tx], Any], *, durable: bool = True) -> Any:
        return self._memory.transact(work, durable=durable)

    def do(self, operation: BaseOperation) -> Any:
        return self.alter(lambda tx: apply_all(tx, [operation])[0], durable=operation.durable)

    def crash(self, lost: int) -> None:
        """The newest `lost` transactions were not synced."""
        self._memory.crash(lost)

    def has_bytes(self) -> bool:
        return bool(self.alter(lambda tx: any(row[0] is not None for row in tx.all(_bytes, {"sid": "s"}))))

    def staged(self) -> list[int]:
        """The fences of the turns that have staged tokens."""
        return [row[0] for row in self.alter(lambda tx: tx.all(select(staged_tokens_table.c.fence), {}))]

    def ends(self) -> None:
        """Process 1 is dead."""
        self.alter(lambda tx: incarnations.end(tx, 1))

    def takes(self, turn: int, at: float = 2.0, *, expected: int = 1, last: float = 1.0, **fields: Any) -> Any:
        """Process 1 claims a tree's turn."""
        known = Known(expected, last, fields.pop("turns", turn - 1))
        of_claim = {name: fields.pop(name) for name in ("most", "is_retry", "unlike") if name in fields}
        event = opened(turn, fields.pop("parent", 0), fields.pop("incarnation", 1), **fields)
        return self.do(Claim("s", known, at, event, LEASE_S, **{"most": 8, **of_claim}))

    def reserves(self, wanted: int | None, *, expected: int = 1, last: float = 1.0, **fields: Any) -> Any:
        """Process 1 claims a tree's turn of a session that may sample ten tokens; what it has reserved."""
        known = Known(expected, last, fields.pop("turns", 0))
        event = opened(fields.pop("turn", 1), 0, fields.pop("incarnation", 1))
        reached = fields.pop("reached", None)
        budgets = (Budget("s", Limits(tokens=10, per="session")),)
        of_claim = {"most": 8, "budgets": budgets, "wanted": wanted, "reached": reached, **fields}
        outcome = self.do(BudgetClaim("s", known, fields.pop("at", 2.0), event, LEASE_S, **of_claim))
        return outcome.events[0].event.reserved if isinstance(outcome, Appended) else outcome

    def commits(self, turn: int, fence: int, *, opened_at: float = 2.0, at: float = 3.0, **fields: Any) -> Any:
        stages = fields.pop("stages", None)
        operation = commit("s", fence, 1, turn=turn, at=at, opened_at=opened_at, **fields)
        return self.do(msgspec.structs.replace(operation, stages=stages))


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryStore]:
    made = MemoryStore()
    yield made
    made.close()


@pytest.fixture
def shared(memory: MemoryStore) -> Shared:
    return Shared(memory)


def test_a_lost_claim_is_given_again(shared: Shared) -> None:
    """A crash undoes a claim; another turn of the same process gets its fence."""
    shared.takes(1)
    shared.crash(1)
    shared.takes(1, 2.5)
    assert shared.commits(1, 2) == Refused("open")
    assert isinstance(shared.commits(1, 2, opened_at=2.5), Appended)


def test_a_lost_claim_is_given_to_another_process(shared: Shared) -> None:
    """Its clock shows the same."""
    shared.takes(1)
    shared.crash(1)
    shared.takes(1, incarnation=2)
    assert shared.commits(1, 2) == Refused("open")


def test_a_clock_stands_still(shared: Shared) -> None:
    """A process claims twice at one time, and the first turn's writes come late."""
    shared.takes(1)
    shared.do(release("s", 2, 1))
    shared.takes(2, expected=3, last=3.0, turns=0)
    assert shared.commits(1, 2) == Refused("open")
    assert shared.do(release("s", 2, 1)) == Refused("open")
    assert not shared.do(stage("s", 2, 1, CHUNK))
    assert not shared.do(StageTokens("s", 2, 1, 2.0, "r" * 64, ROW))


def test_a_lost_claim_is_released(shared: Shared) -> None:
    """A crash undoes a claim; another turn of the same process gets its fence, and the first one's release comes."""
    shared.takes(1)
    shared.crash(1)
    shared.takes(1, 2.5)
    assert shared.do(release("s", 2, 1)) == Refused("open")


def test_a_claim_that_another_process_got_is_released(shared: Shared) -> None:
    shared.takes(1)
    shared.crash(1)
    shared.takes(1, incarnation=2)
    assert shared.do(release("s", 2, 1)) == Refused("open")


def test_two_turns_come_first(shared: Shared) -> None:
    """Each decides what the session's history is; the second has to look at what the first has decided."""
    shared.takes(1, most=1, history="tree")
    assert shared.takes(1, 2.5, most=1, turns=0, history="tree", incarnation=2) == Stale()


def test_another_request_is_marked(shared: Shared) -> None:
    """It is no retry of the turn in flight."""
    shared.takes(1)
    assert isinstance(shared.takes(1, 2.5, incarnation=2, is_retry=True, body_hash="o" * 32), Appended)


def test_two_turns_have_staged_tokens(shared: Shared) -> None:
    """The one that is in flight keeps its own when the other commits."""
    for at, fence in ((2.0, 2), (2.5, 3)):
        shared.takes(1, at, turns=0)
        assert shared.do(StageTokens("s", fence, 1, at, "r" * 64, ROW))
    staged = shared.commits(1, 2, known=Known(3, 2.5, 0), stages="turn")
    assert isinstance(staged, Appended)
    assert shared.staged() == [3]


def test_an_engine_dies(shared: Shared) -> None:
    """Its turn ends, and the retry goes on from what it has staged."""
    shared.takes(1)
    assert shared.do(StageTokens("s", 2, 1, 2.0, "r" * 64, ROW))
    shared.do(msgspec.structs.replace(release("s", 2, 1), keeps_staged=True))
    assert shared.staged() == [2]


def test_a_log_was_written_anew(shared: Shared) -> None:
    """A crash undoes a turn's beginning and end; others take their places."""
    shared.takes(1)
    shared.do(release("s", 2, 1))
    shared.crash(2)
    shared.takes(1, 2.5, incarnation=2)
    shared.do(msgspec.structs.replace(release("s", 2, 2), opened_at=2.5, at=3.5))
    assert shared.takes(2, 4.0, expected=3, last=3.0, turns=0) == Stale()


def test_a_tree_has_grown(shared: Shared) -> None:
    """The request might join the turn that another process has committed meanwhile."""
    shared.takes(1)
    shared.commits(1, 2)
    assert shared.takes(1, 4.0, incarnation=2) == Stale()


def test_a_tree_is_full(shared: Shared) -> None:
    shared.takes(1)
    assert shared.takes(1, 2.5, turns=0, most=1, incarnation=2) == Busy(1, 2, 1, BODY, None, 2.0)


def test_a_tree_was_restored(shared: Shared) -> None:
    """It has as many turns as the process knows, but not those."""
    for turn in (1, 2):
        place = 1 if turn == 1 else 3
        shared.takes(turn, float(turn), expected=place, last=1.0 if turn == 1 else 3.0)
        shared.commits(turn, place + 1, opened_at=float(turn))

    def restore(tx: Tx) -> None:
        tx.run(update(sessions).values(turns=1), {})
        advance_head(tx, "s", 5.0, [SessionRestored("named", 3)])

    shared.alter(restore)
    shared.takes(3, 6.0, expected=6, last=5.0, turns=1)
    assert isinstance(shared.commits(3, 7, opened_at=6.0, known=Known(7, 6.0, 1)), Appended)
    assert shared.takes(4, 7.0, expected=5, last=3.0, turns=2, incarnation=2) == Stale()


@pytest.mark.parametrize("event", [SessionFinished("f" * 32, True), RolloutJoined("root", has_limits=True)])
def test_no_turn_may_be_opened_any_more(shared: Shared, event: Event) -> None:
    """Or limits count that the claim does not know."""
    shared.alter(lambda tx: advance_head(tx, "s", 2.0, [event]))
    assert shared.takes(1, 2.5) == Stale()


def test_two_turns_are_numbered(shared: Shared) -> None:
    """Neither process knows of the other's turn."""
    numbers = [shared.takes(1, at, turns=0).events[0].event.turn for at in (2.0, 2.5)]
    assert numbers == [1, 2]


def test_a_request_is_sent_again(shared: Shared) -> None:
    """To another process, while its turn is in flight."""
    shared.takes(1, retry_key=KEY)
    assert isinstance(shared.takes(1, 2.5, incarnation=2, retry_key=KEY), Busy)


def test_a_marked_request_is_sent_again(shared: Shared) -> None:
    shared.takes(1)
    assert isinstance(shared.takes(1, 2.5, incarnation=2, is_retry=True), Busy)


def test_another_agent_sends_the_same(shared: Shared) -> None:
    """Its retry is not of the turn in flight."""
    shared.takes(1)
    assert isinstance(shared.takes(1, 2.5, incarnation=2, is_retry=True, unlike=[2]), Appended)


def test_a_dead_turn_is_sent_again(shared: Shared) -> None:
    """Its owner is dead, and must not commit after all."""
    shared.takes(1)
    shared.commits(1, 2)
    turn = {"expected": 3, "last": 3.0, "parent": 1, "retry_key": KEY}
    shared.takes(2, 4.0, **turn)
    shared.ends()
    again = shared.takes(2, 4.5, incarnation=2, **turn)
    assert [type(recorded.event) for recorded in again.events] == [TurnOpened]
    assert shared.commits(2, 4, opened_at=4.0) == Refused("open")


def test_another_turn_was_committed(shared: Shared) -> None:
    """A turn's events depend on the turns before it."""
    for at in (2.0, 2.5):
        shared.takes(1, at, turns=0)
    decided = Known(3, 2.5, 0)
    assert isinstance(shared.commits(1, 2, known=decided), Appended)
    assert shared.commits(2, 3, opened_at=2.5, known=decided) == Stale()


def test_chunks_are_shared(shared: Shared) -> None:
    """A turn that was opened after a tombstone was decided continues the turn whose payload it frees."""
    _has_payload(shared)
    shared.takes(2, 4.0, expected=3, last=3.0, parent=1)
    decided = Known(4, 4.0, 1)
    shared.takes(3, 5.0, expected=3, last=3.0, parent=1, turns=1)
    assert shared.commits(2, 4, opened_at=4.0, after=[FREED], known=decided) == Stale()
    assert shared.has_bytes()


def test_chunks_are_shared_after_a_crash(shared: Shared) -> None:
    """The log is as long as it was, but another turn is open."""
    _has_payload(shared)
    shared.takes(2, 4.0, expected=3, last=3.0, parent=1)
    shared.takes(3, 5.0, expected=3, last=3.0, parent=0, turns=1)
    shared.crash(1)
    shared.takes(3, 6.0, expected=3, last=3.0, parent=1, turns=1, incarnation=2)
    decided = Known(5, 5.0, 1)
    assert shared.commits(2, 4, opened_at=4.0, after=[FREED], known=decided) == Stale()
    assert shared.has_bytes()


def test_a_checkpoint_is_made(shared: Shared) -> None:
    """It has the payload that a commit, decided before it, would free."""
    _has_payload(shared)
    shared.takes(2, 4.0, expected=3, last=3.0, parent=1)
    shared.alter(_make_checkpoint)
    assert shared.commits(2, 4, opened_at=4.0, after=[FREED], known=Known(4, 4.0, 1)) == Pinned(3)
    assert shared.has_bytes()


def test_staged_chunks_are_lost(shared: Shared) -> None:
    """A crash undoes the staging, and keeps the claim."""
    shared.takes(1)
    shared.do(stage("s", 2, 1, CHUNK))
    shared.crash(1)
    assert shared.commits(1, 2, payloads=(payload(2, 0),)) == Refused("open")


def test_staged_tokens_are_in_use(shared: Shared) -> None:
    """The turn that staged them is in flight."""
    shared.takes(1)
    assert shared.do(StageTokens("s", 2, 1, 2.0, "r" * 64, ROW))
    shared.takes(1, 2.5, turns=0)
    assert not shared.do(TakeOverStaged("s", 3, 1, 2.5, 2))


def test_a_closed_session_changes(shared: Shared) -> None:
    """A freeing was decided for the state before: a restore may have given back a turn since."""
    _has_payload(shared)
    shared.do(Close("s", 5.0))
    shared.do(reward("s", 1.0))
    assert shared.do(FreeReplay("s", 4, 7.0, FREED)) == Appended(())


def test_a_freeing_is_lost(shared: Shared) -> None:
    """A crash undoes the event that says that the chunks are free."""
    _has_payload(shared)
    shared.do(Close("s", 5.0))
    shared.do(FreeReplay("s", 4, 7.0, FREED))
    shared.crash(1)
    shared.do(FreeChunks("s", 5, 8))
    assert shared.has_bytes()


def test_a_closed_session_is_in_a_checkpoint(shared: Shared) -> None:
    _has_payload(shared)
    shared.do(Close("s", 5.0))
    shared.alter(_make_checkpoint)
    assert shared.do(FreeReplay("s", 4, 7.0, FREED, unless_pinned=True)) == Appended(())


def test_an_attempt_comes_late(shared: Shared) -> None:
    """Two of them, at other processes, behind a turn that one attempt came before."""
    shared.takes(1)
    shared.commits(1, 2)
    assert not shared.do(AbsorbAttempt("s", 1, 1, 9.0, lambda: 9.0))
    assert [shared.do(AbsorbAttempt("s", 1, 1, 3.0, lambda: 9.0)) for _ in range(2)] == [True, False]


def test_a_claims_answer_is_lost(shared: Shared) -> None:
    """Its turn has ended; another one of the session is in flight."""
    for at in (2.0, 2.5):
        shared.takes(1, at, turns=0)
    assert shared.do(AbandonLost(1, 9.0, {("s", 2.5)})) == 1


def test_a_session_is_erased(shared: Shared) -> None:
    """A snapshot of it is saved late."""
    shared.do(Close("s", 5.0))
    shared.do(Erase("s", 6.0))
    shared.do(SaveSnapshot("s", 3, "format", b"what it said"))
    assert not shared.alter(lambda tx: tx.all(select(snapshots.c.seq), {}))


def test_two_turns_reserve_tokens(shared: Shared) -> None:
    """The second gets what the first leaves, and the third nothing before one of them ends."""
    assert [shared.reserves(6), shared.reserves(6)] == [6, 4]
    assert shared.reserves(6) == Limited("tokens", frozenset({1}))
    shared.do(msgspec.structs.replace(release("s", 2, 1), opened_at=2.0))
    assert shared.reserves(None, expected=4, last=3.0) == 6


def test_a_turn_has_sampled_tokens(shared: Shared) -> None:
    """It gives back what it has reserved, but for those."""
    assert shared.reserves(None) == 10
    operation = commit("s", 2, 1, turn=1, at=3.0, opened_at=2.0)
    sampled = operation.turn.output_tokens
    assert isinstance(shared.do(BudgetCommit(**msgspec.structs.asdict(operation))), Appended)
    assert shared.reserves(None, expected=3, last=3.0, turns=1, turn=2) == 10 - sampled


def test_a_limit_ends_a_turn(shared: Shared) -> None:
    """What it has sampled is used, though nobody has it."""
    assert shared.reserves(4) == 4
    ended = msgspec.structs.asdict(release("s", 2, 1)) | {"then": [LimitReached("tokens", 0, 4)]}
    assert isinstance(shared.do(EndAtLimit(**ended, sampled=4)), Appended)
    assert shared.reserves(None, expected=4, last=3.0) == 6


def test_the_time_is_over(shared: Shared) -> None:
    assert shared.reserves(1, reached="seconds") == Limited("seconds")


def test_a_dead_process_has_reserved_all(shared: Shared) -> None:
    shared.reserves(None)
    shared.ends()
    assert shared.reserves(1, incarnation=2) == Stale()
    assert shared.reserves(1, expected=3, last=2.0, incarnation=2) == 1


def test_another_process_has_used_all(shared: Shared) -> None:
    """By the turn that the request repeats: it has to look at the log first."""
    shared.reserves(None)
    operation = commit("s", 2, 1, turn=1, at=3.0, opened_at=2.0, output_tokens=10)
    assert isinstance(shared.do(BudgetCommit(**msgspec.structs.asdict(operation))), Appended)
    assert shared.reserves(None, incarnation=2) == Stale()


def test_a_name_has_expired(shared: Shared) -> None:
    """The next turn that binds it chooses the engine anew."""

    def uses(action: Action | None, lasts_s: float | None, engine: str) -> Used:
        used: Used = shared.do(Use(SessionControl("c", action, lasts_s), "s", 1, LEASE_S, engine, frozenset()))
        return used

    for lasts_s, engine in ((-1.0, "http://a"), (60.0, "http://b")):
        assert uses("bind", lasts_s, engine) == Used("bound", engine, lasts_s)
    assert uses(None, None, "") == Used("bound", "http://b", 60.0)


def _has_payload(shared: Shared) -> None:
    """Turn 1 is on disk, with a payload of one chunk; its last event is 3, of 3.0."""
    shared.takes(1)
    assert isinstance(shared.commits(1, 2, chunks=[CHUNK], payloads=(payload(2, 0),)), Appended)


def _make_checkpoint(tx: Tx) -> None:
    row = {"id": 1, "name": "named", "state": "made", "cut": "now", "created_at": 4.0, "sessions": 1, "groups": 0}
    row["run"] = "default"
    tx.insert(insert(checkpoints), [row])
    tx.insert(insert(checkpoint_sessions), [{"checkpoint_id": 1, "session_id": "s", "seq": 3, "is_done": False}])
