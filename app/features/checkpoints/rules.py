"""Takes a session back to what it was after an earlier event; nothing is removed from its log."""

from __future__ import annotations

from app.domain.events import Event, RewardAssigned, SessionRestored
from app.domain.session import Session


def restoring(then: Session | None, checkpoint: str) -> list[Event]:
    """The events that make a session's state `then` again; None: the session did not exist.

    The claims of open turns are ended before, by whoever writes the events.
    """
    if then is None:
        return [SessionRestored(checkpoint, 0)]
    assert then.status != "erased", f"session {then.session_id} was erased when checkpoint {checkpoint} was made"
    return [SessionRestored(checkpoint, then.version), *_rewards(then)]


def _rewards(then: Session) -> list[RewardAssigned]:
    """Assigned again, so that the newest events of this kind say what holds."""
    own = then.reward
    of_session = (
        []
        if own is None
        else [RewardAssigned(own.reward, own.components, of_root=then.has_roots_reward, restored=True)]
    )
    turns = [
        RewardAssigned(one.reward, one.components, turn, restored=True)
        for turn, one in sorted(then.turn_rewards.items())
    ]
    return [*of_session, *turns]
