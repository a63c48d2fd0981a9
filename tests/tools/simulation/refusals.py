"""Whether a turn was rightly told that another one is in its way: by the log, at the moment when it was told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, bindparam, select

from app.domain.events import Recorded, TurnAbandoned, TurnCommitted, TurnOpened, TurnRejected
from app.errors import AppError, ClaimLost, SessionBusy
from app.store.schema import sessions
from tests.tools.simulation.calls import Chat
from tests.tools.simulation.history import Asked, History
from tests.tools.simulation.world import World

_version = select(sessions.c.version).where(sessions.c.session_id == bindparam("sid"))


def version_of(connection: Connection, session_id: str) -> int:
    """The seq of the newest event of a session's log; 0 where there is none."""
    return connection.execute(_version, {"sid": session_id}).scalar() or 0


def check(world: World, asked: Asked, error: AppError) -> None:
    """`session_busy` only beside another turn, and not because of the one that it repeats, though that may be a dead
    process's; of a tree, beside as many as there may be. `claim_lost` only where somebody else has ended the claim.

    A crash of the database may undo a claim. What is wrong becomes a problem of the schedule.
    """
    history, turn = world.history, asked.turn
    assert turn is not None
    if not isinstance(error, (SessionBusy, ClaimLost)) or history.crashed_since(asked.start):
        return
    log = world.store.log(asked.session_id)
    if isinstance(error, ClaimLost):
        ends = {recorded.event.fence for recorded in log if isinstance(recorded.event, TurnAbandoned)}
        fence = None if turn.claim is None else turn.claim.seq
        world.must(fence in ends, f"{asked.session_id} lost the claim {fence}, which nobody has ended")
        return
    rivals = {*_opened(log, asked), *_beside(history, asked)}
    if turn.new_history == "tree":
        # A claim of which nobody heard is told from others by its time alone, and time stands still here.
        least = world.settings.max_open_turns if error.retry else 1
    else:
        least = 0 if error.retry else 1  # It may be retried where others came first again and again.
    what = f"a turn of {asked.session_id} was told that it is busy beside {len(rivals)} others"
    world.must(len(rivals) >= least, what)


def _opened(log: Sequence[Recorded], asked: Asked) -> Iterator[int]:
    """The fences of the turns that were open at some moment of the call's; in a linear session, that it repeats not."""
    turn = asked.turn
    assert turn is not None
    ends = {
        recorded.event.fence: recorded.seq
        for recorded in log
        if isinstance(recorded.event, (TurnCommitted, TurnAbandoned, TurnRejected))
    }
    for recorded in log:
        event = recorded.event
        if isinstance(event, TurnOpened) and ends.get(recorded.seq, asked.version + 1) > asked.version:
            is_marked = turn.is_retry and turn.retry_key is None
            repeats = is_marked and (turn.body_hash, turn.agent_id) == (event.body_hash, event.agent_id)
            repeats |= turn.retry_key is not None and turn.retry_key == event.retry_key
            if turn.new_history == "tree" or not repeats:
                yield recorded.seq


def _beside(history: History, asked: Asked) -> Iterator[int]:
    """The turns that the same process was at meanwhile, but for those that it repeats: their fences, or numbers below
    zero where they have no claim yet."""
    request = asked.request
    assert isinstance(request, Chat)
    for place, other in enumerate(history.asked.get(asked.session_id, ()), 1):
        is_beside = other.process == asked.process and other.end >= asked.start and other is not asked
        if is_beside and isinstance(other.request, Chat) and not request.repeats(other.request):
            yield -place if other.turn is None or other.turn.claim is None else other.turn.claim.seq
