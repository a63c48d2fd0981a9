"""Who may attach where in a session: the rules of one live path, and those of a tree. A session has the one or the
other for good; its history, once the first turn has decided it, finds them in `RULES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from app.domain.events import History
from app.domain.session import Session
from app.domain.tree import Branch, TreeIndex
from app.domain.turns import Turn
from app.errors import HistoryMismatch, RollbackTooDeep

if TYPE_CHECKING:
    from app.domain.history import Incoming

SegmentCause = Literal["drift", "divergence"]


class Plan(msgspec.Struct, frozen=True):
    """Where a request joins: after live turn `parent` (0: at the beginning).

    Its first `base_messages` messages are stored ones; the `discarded` turns end if it commits.
    """

    parent: int
    base_messages: int
    discarded: tuple[int, ...] = ()


class Rules(Protocol):
    """What differs between the histories."""

    def join(self, request: Incoming, session: Session, index: TreeIndex, agent_id: str | None) -> Plan:
        """Where a chat's request, which has been checked, joins the session."""

    def segment(self, session: Session, plan: Plan, base: int, branch: Branch) -> tuple[int, SegmentCause | None]:
        """The segment of a turn that continues `base` tokens of its parent, and the cause if it begins here."""

    def superseded(self, session: Session) -> set[int]:
        """The turns that no row is made of, unless all branches are asked for."""

    def just_superseded(self, session: Session, index: TreeIndex) -> Collection[int]:
        """The turns with payloads that the newest turn has superseded; `index` may lack it."""

    def rolled_back(self, session: Session, number: int) -> int:
        """How many live turns the commit of turn `number` rolled back: those from its parent to the previous leaf."""


class Linear:
    """One live path. A request continues its end; or it goes back on it, which supersedes the turns behind."""

    def join(self, request: Incoming, session: Session, index: TreeIndex, agent_id: str | None) -> Plan:
        """A request supersedes turns only if it repeats the input of one of them, or follows a reply that this session
        sampled.

        Raises RollbackTooDeep if it goes back beyond the session's window, and HistoryMismatch if it shares nothing
        sampled with the history, or has an assistant message where another one is stored.
        """
        leaf = session.turns.newest
        if leaf is None:
            return Plan(0, 0)
        plan = Plan(leaf.number, leaf.message_count) if request.continues(leaf) else _compared(session, leaf, request)
        if request.left_out and plan.base_messages <= min(request.left_out):
            # The request begins a segment: its history is what the client sent.
            request.read_as_sent(index)
        return plan

    def segment(self, session: Session, plan: Plan, base: int, branch: Branch) -> tuple[int, SegmentCause | None]:
        """Segments are numbered along the live path, so that a discarded one leaves no gap."""
        if plan.parent == 0:
            return 0, None
        segment = session.turns[plan.parent].segment
        return (segment, None) if base else (segment + 1, "drift" if plan.base_messages else "divergence")

    def superseded(self, session: Session) -> set[int]:
        """The turns off the live path."""
        live = set(session.path)
        return {turn.number for turn in session.turns if turn.number not in live}

    def just_superseded(self, session: Session, index: TreeIndex) -> Collection[int]:
        newest = session.turns.newest
        if newest is None or not session.payloads:
            return ()
        live, at, oldest = set[int](), newest.number, min(session.payloads)
        while at >= oldest and at:
            live.add(at)
            at = session.turn(at).parent
        return session.payloads.keys() - live

    def rolled_back(self, session: Session, number: int) -> int:
        parent, count = session.turn(number).parent, 0
        before = next((turn for turn in reversed(session.turns) if turn.number < number), None)
        while before is not None and before.number > parent:
            before, count = session.turns.get(before.parent), count + 1
        return count


class Tree:
    """Any number of branches: a request attaches to the deepest turn whose whole history begins it."""

    def join(self, request: Incoming, session: Session, index: TreeIndex, agent_id: str | None) -> Plan:
        """Of several turns, one that the request proves to hold is preferred, then one of the same agent, then one
        whose request the client spelled as this one, then the newest."""

        def preference(turn: Turn) -> tuple[bool, bool, bool, int]:
            return request.names(turn), turn.agent_id == agent_id, request.repeats(turn), turn.seq

        for history in request.histories(index):
            ending = [session.turn(number) for number in index.ending_with(history) if number in session.turns]
            if ending:
                parent = ending[0] if len(ending) == 1 else max(ending, key=preference)
                return Plan(parent.number, parent.message_count)
        return Plan(0, 0)

    def segment(self, session: Session, plan: Plan, base: int, branch: Branch) -> tuple[int, SegmentCause | None]:
        """It is the branch."""
        return branch.number, "drift" if branch.cause == "drift" else None

    def superseded(self, session: Session) -> set[int]:
        """A childless turn is superseded by a sibling with the same request and agent that was opened after it had
        committed, and has a child."""
        parents = {turn.history_parent for turn in session.turns}
        continued: dict[tuple[int, str, str | None], Turn] = {}
        for turn in session.turns:
            if turn.number in parents:
                key = turn.history_parent, turn.body_hash, turn.agent_id
                continued[key] = max(continued.get(key, turn), turn, key=lambda sibling: sibling.opened_seq)
        childless = (turn for turn in session.turns if turn.number not in parents)
        return {
            turn.number
            for turn in childless
            if (newer := continued.get((turn.history_parent, turn.body_hash, turn.agent_id))) and newer.supersedes(turn)
        }

    def just_superseded(self, session: Session, index: TreeIndex) -> Collection[int]:
        """Those of which the newest turn's parent, whose first child it is, is a sibling."""
        newest = session.turns.newest
        if newest is None or not newest.history_parent or not session.payloads:
            return ()
        parent = session.turn(newest.history_parent)
        siblings = index.siblings(parent.history_parent)
        return {turn.number for turn in siblings if parent.supersedes(turn) and turn.number not in index.by_parent}

    def rolled_back(self, session: Session, number: int) -> int:
        return 0


_LINEAR: Rules = Linear()
RULES: Mapping[History | None, Rules] = {"linear": _LINEAR, None: _LINEAR, "tree": Tree()}
"""By a session's history. One that no turn has decided has no turns to attach to."""


def superseded(session: Session) -> set[int]:
    """The turns that no row is made of, unless all branches are asked for."""
    return RULES[session.history].superseded(session)


# one live path


def _compared(session: Session, leaf: Turn, request: Incoming) -> Plan:
    """Where a request joins that does not simply continue the newest turn. Raises as `Linear.join`."""
    if leaf.protocol == "completions":
        return diverging(session, HistoryMismatch("the session's last turn is a completion, not a chat"))
    history = session.message_chain(leaf.number)
    equal = _equal_messages(history, request, session.config.rollback_window)
    if equal >= leaf.message_count:
        return Plan(leaf.number, leaf.message_count)
    kept = [turn for turn in history if turn.message_count <= equal]
    gone = history[len(kept) :]
    error = _refusal(session, request, equal, gone, follows_sampled=bool(kept))
    if error is None:
        numbers = tuple(turn.number for turn in gone)
        return Plan(gone[0].parent, kept[-1].message_count if kept else 0, numbers)
    return diverging(session, error)


def diverging(session: Session, error: HistoryMismatch | RollbackTooDeep) -> Plan:
    """Where a request joins that diverges from the stored history: it begins a segment, if the session allows that."""
    if session.config.on_divergence == "segment" and session.leaf is not None:
        return Plan(session.leaf.number, 0)
    raise error


def _equal_messages(history: Sequence[Turn], request: Incoming, window: int) -> int:
    """How many of the request's first messages are the stored ones.

    A retry begins with the exact bytes of a recent turn's request; those messages are not compared again.
    """
    stored = [message_hash for turn in history for message_hash in turn.message_hashes]
    # From the oldest turn on, so that each byte of the request is hashed once.
    repeated = [turn.message_count - 1 for turn in history[-window - 1 :] if request.repeats(turn)]
    place = repeated[-1] if repeated else 0
    while place < min(len(stored), len(request)) and request.canonical(place) == stored[place]:
        place += 1
    return place


def _refusal(
    session: Session, request: Incoming, equal: int, superseded: Sequence[Turn], *, follows_sampled: bool
) -> HistoryMismatch | RollbackTooDeep | None:
    """Why the request may not supersede these turns, the newest of the history; None if it may.

    Its first `equal` messages are stored ones; `follows_sampled`: one of them is a reply of the session.
    """
    roles = [request.message(index)["role"] for index in range(equal, len(request))]
    if "assistant" in roles:
        return HistoryMismatch(
            f"messages[{equal}] is not the stored message at that place (matcher {session.config.matcher}), and "
            f"an assistant message follows that this session never produced there; "
            f"{equal} of {len(request)} messages match"
        )
    repeats_input = equal == len(request) == superseded[0].message_count - 1
    if not (follows_sampled or repeats_input):
        return HistoryMismatch(
            f"the request begins another conversation: {equal} of {len(request)} messages match (matcher "
            f"{session.config.matcher}), none of them sampled in this session, and it repeats no turn's input"
        )
    window = session.config.rollback_window
    if len(superseded) > window:
        return RollbackTooDeep(
            f"the request goes back {len(superseded)} turns, to message {equal}; "
            f"the session's rollback window is {window}"
        )
    return None
