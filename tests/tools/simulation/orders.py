"""Do the calls of each session of a schedule have an order that explains them, up to what its log says at the end?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from app.domain.events import SessionClosed, TurnCommitted, UnknownEvent
from tests.tools.simulation.calls import Audit, Call, Chat, Close, Done, Erase, Told
from tests.tools.simulation.history import Asked, History
from tests.tools.simulation.linearizable import Checker, TooLong
from tests.tools.simulation.session_model import Rules, State
from tests.tools.simulation.store import Store

MOST = 3000
"""States of one session that are searched."""


def judge(store: Store, history: History) -> None:
    """Search, for the sessions that clients have created; what has no order becomes a problem of the history.

    Once in a schedule: what comes after the store was taken back begins from a state that is not known here.
    """
    if history.is_searched:
        return
    history.is_searched = True
    for session_id, site in history.sessions.items():
        asked = history.asked.get(session_id, [])
        try:
            audit = _audit(store, session_id, asked, history.now())
        except UnknownEvent as error:
            history.problem(f"the log of {session_id} cannot be read: {error}")
            continue
        calls = [one.call() for one in asked]
        calls += [audit, *_ends(history, session_id)]
        config = site.config
        rules = Rules(None if site.is_tree else config.rollback_window, config.on_divergence == "segment")
        begins = State(is_tree=site.is_tree, created=False)
        try:
            fault = Checker(calls, rules, begins=begins, most=MOST).fault()
        except TooLong:
            history.unsearched += 1
            continue
        history.searched += 1
        if fault is not None:
            history.problem(f"the calls of {session_id} have no order: {fault}")


def _audit(store: Store, session_id: str, asked: Sequence[Asked], now: float) -> Call:
    """The log as it is now. The body of a turn is that of the request which it was opened for."""
    log = store.log(session_id)
    bodies = {
        (one.opened.turn, one.opened.body_hash): one.request.body
        for one in asked
        if one.opened is not None and isinstance(one.request, Chat)
    }
    turns = [recorded.event for recorded in log if isinstance(recorded.event, TurnCommitted)]
    told = tuple((turn.turn, turn.parent, bodies.get((turn.turn, turn.body_hash), "")) for turn in turns)
    return Call(now, now, Audit(), Told(told, any(isinstance(recorded.event, SessionClosed) for recorded in log)))


def _ends(history: History, session_id: str) -> Iterator[Call]:
    """What may end the session beside its own clients' closes: an erasure closes it first, a root closes its rollout,
    the janitor closes what is idle."""
    for one in history.asked.get(session_id, ()):
        if isinstance(one.request, Erase):
            yield Call(one.start, math.inf, Close(with_root=True), None)
    parent = history.sessions[session_id].config.parent
    for one in history.asked.get(parent, ()) if parent is not None else ():
        if isinstance(one.request, (Close, Erase)):
            yield Call(one.start, math.inf, Close(with_root=True), None)
            if isinstance(one.reply, Done):
                yield Call(one.start, one.end, Close(with_root=True), Done())
            if isinstance(one.request, Erase):
                yield Call(one.start, one.end, Erase(with_root=True), one.reply)
    if history.closes_idle:
        yield Call(0.0, math.inf, Close(with_root=True), None)
