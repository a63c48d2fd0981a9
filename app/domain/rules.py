"""The index of a session's turns by their histories, and the rules by which they become branches, segments and rows.

A history is identified by a running hash over the canonical hashes of its messages, so that the deepest turn that a
request continues is found without walking every path.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from app.domain.calls import OddCalls
from app.domain.events import COMPLETIONS, BranchCause
from app.domain.session import Session, Turn, Turns
from app.errors import HistoryMismatch, RollbackTooDeep

EMPTY_HASH = ""
"""The running hash of an empty history."""

EMPTY_REPLY = hashlib.sha256(b'["assistant","",[],null]').hexdigest()[:32]
"""The canonical hash (`tolerant`) of a reply with neither text nor calls."""

RECENT_COUNTS = 8
"""Lengths of earlier requests at which a request's bytes are compared first, the longest before the others: a new one
is usually a few messages longer than the one that it continues."""


def running_hash(before: str, message_hash: str) -> str:
    """The hash of a history with one more message: 128 bits as hex."""
    return hashlib.sha256(f"{before}:{message_hash}".encode()).hexdigest()[:32]


class _Newest(dict[str | int | None, int]):
    """The newest turn of each key. `older` has the turn of the same key before each turn: few share one, so there is no
    list for each."""

    __slots__ = ("older",)

    def __init__(self) -> None:
        self.older: dict[int, int] = {}

    def all(self, key: str | int) -> Iterator[int]:
        """The turns of a key, the newest first."""
        number = self.get(key)
        while number is not None:
            yield number
            number = self.older.get(number)


class TreeIndex:
    """Finds turns by what their histories are. Grows with each commit; never shrinks.

    `by_parent` has the turns that continue a turn (0: that begin a conversation), `by_history` those whose whole
    history has a running hash, `by_input` those whose request has one (a completion's: the hash of its prompt), and
    `by_body` those whose request has a hash. `inputs` has each turn's input.
    """

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[int, Turn] = {}
        self._histories: dict[int, str] = {}
        self.inputs: dict[int, str] = {}
        self.by_parent = _Newest()
        self.by_history = _Newest()
        self.by_input = _Newest()
        self._by_reply = _Newest()
        self._by_bare_reply = _Newest()
        self._by_calls = _Newest()
        self.by_body = _Newest()
        self.by_prefix_hash: dict[str, Turn] = {}
        self.odd_calls = OddCalls()
        self.has_odd_calls = self.has_empty_replies = False
        self.counts: list[int] = []
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn) -> None:
        """A turn has been committed."""
        number, hashes, is_chat = turn.number, turn.message_hashes, turn.protocol not in COMPLETIONS
        self._turns[number] = turn
        keys: list[tuple[_Newest, str | int | None]] = [
            (self.by_parent, turn.parent if turn.base_messages else 0),
            (self.by_body, turn.body_hash or None),
        ]
        if is_chat:
            parent = self._turns.get(turn.parent) if turn.base_messages else None
            at = EMPTY_HASH
            if parent is not None:
                is_whole = parent.message_count == turn.base_messages and parent.number in self._histories
                at = self._histories[parent.number] if is_whole else self.prefixes(parent)[turn.base_messages]
            for message_hash in hashes[:-1]:
                at = hashlib.sha256(f"{at}:{message_hash}".encode()).hexdigest()[:32]
            self.inputs[number] = at
            after = hashlib.sha256(f"{at}:{hashes[-1]}".encode()).hexdigest()[:32]
            self._histories[number] = after
            keys += (
                (self.by_input, at),
                (self.by_history, after),
                (self._by_reply, hashes[-1]),
                (self._by_calls, turn.calls_hash),
                (self._by_bare_reply, turn.bare_hash),
            )
        else:
            keys.append((self.by_input, turn.client_hash))
        for newest, key in keys:
            if key is not None:
                if (before := newest.get(key)) is not None:
                    newest.older[number] = before
                newest[key] = number
        if not is_chat:
            return
        if EMPTY_REPLY in (hashes[-1], turn.bare_hash):
            self.has_empty_replies = True
        if turn.odd_ids or turn.odd_arguments or turn.given_ids is not None:
            # A client may return a call of this reply otherwise than the engine spelled it.
            self.has_odd_calls = True
            self.odd_calls.add(number, turn.given_ids)
        count = turn.message_count - 1
        self.by_prefix_hash[turn.client_hash] = turn
        if not self.counts or count > self.counts[-1]:
            self.counts.append(count)
            return
        place = bisect.bisect_left(self.counts, count)
        if self.counts[place] != count:
            self.counts.insert(place, count)

    def turn(self, number: int) -> Turn | None:
        """The turn with this number, if the index has it."""
        return self._turns.get(number)

    def turn_within(self, number: int, messages: int) -> Turn | None:
        """The newest turn of this turn's history whose request has at most so many messages."""
        turn = self.turn(number)
        while turn is not None and turn.message_count - 1 > messages:
            turn = self.turn(turn.history_parent)
        return turn

    def prefixes(self, turn: Turn) -> list[str]:
        """The running hashes of the turn's history: item n is that of its first n messages."""
        prefixes = [EMPTY_HASH]
        for message_hash in self.message_hashes(turn):
            prefixes.append(running_hash(prefixes[-1], message_hash))
        return prefixes

    def message_hashes(self, turn: Turn) -> list[str]:
        """The canonical hashes of the messages of the turn's whole history."""
        chain = [turn]
        while (parent := self._turns.get(chain[-1].history_parent)) is not None:
            chain.append(parent)
        hashes: list[str] = []
        for member in reversed(chain):
            del hashes[member.base_messages :]
            hashes += member.message_hashes
        return hashes

    def repeated(self, messages: int, prefix_hash: Callable[[int], str]) -> Turn | None:
        """The newest of the longest earlier requests with whose bytes this one begins: it has so many messages, and
        `prefix_hash` gives a hash of the bytes of the first ones."""
        stop = bisect.bisect_right(self.counts, messages)
        likely, recent = max(stop - 1, 0), max(stop - RECENT_COUNTS, 0)
        for counts in (self.counts[likely:stop], self.counts[recent:likely], self.counts[:recent]):
            keys = [prefix_hash(count) for count in counts]
            for key in reversed(keys):
                if (turn := self.by_prefix_hash.get(key)) is not None:
                    return turn
        return None

    def sampled(self, message_hash: str) -> Iterator[int]:
        """The turns whose reply has this canonical hash, the newest first; then those whose `bare_hash` it is."""
        yield from self._by_reply.all(message_hash)
        yield from self._by_bare_reply.all(message_hash)

    @property
    def has_bare_replies(self) -> bool:
        """Has any reply reasoning in its text?"""
        return bool(self._by_bare_reply)

    def with_calls(self, calls_hash: str) -> Iterator[Turn]:
        """The turns whose reply has this hash without its calls' arguments, the newest first."""
        return (self._turns[number] for number in self._by_calls.all(calls_hash))

    def with_input(self, input_hash: str) -> Iterator[Turn]:
        """The turns whose request has this running hash (a completion's: the hash of its prompt), the newest first."""
        return (self._turns[number] for number in self.by_input.all(input_hash))

    def knows_body(self, *body_hashes: str | None) -> bool:
        """Has a turn's request one of these hashes?"""
        return any(body_hash in self.by_body for body_hash in body_hashes)

    def with_body(self, body_hash: str) -> Iterator[int]:
        """The turns whose request has this hash, the newest first."""
        return self.by_body.all(body_hash)

    def has_children(self, parent: int) -> bool:
        """Does a turn continue `parent`?"""
        return parent in self.by_parent

    def siblings(self, parent: int) -> Iterator[Turn]:
        """The turns that continue `parent` (0: that begin a conversation), the newest first."""
        return (self._turns[number] for number in self.by_parent.all(parent))


class Branch(msgspec.Struct, frozen=True):
    """The branch of a turn. `cause` is None where it continues its parent's; `carries` as in `TurnCommitted`."""

    number: int
    cause: BranchCause | None = None
    carries: int | None = None


def branch_of(session: Session, index: TreeIndex, turn: NewTurn) -> Branch:
    """The branch that a turn begins, which is about to be committed: only a turn's first child whose tokens continue
    it continues its branch."""
    has_siblings = turn.parent in index.by_parent
    if not session.turns.count:
        return Branch(0, "start")
    if any(turn.repeats(other) for other in index.with_input(turn.input_hash)):
        return Branch(session.branches, "retry")
    carries = _carried(session, index, turn) if has_siblings or not turn.parent else None
    return Branch(session.branches, _cause(session, turn, has_siblings, carries), carries)


class NewTurn(msgspec.Struct, frozen=True):
    """What decides a turn's branch. `parent` is the turn whose messages it continues (0: none); `message_hashes` are
    its new messages', `input_hash` is the running hash of all of them, or the hash of a completion's prompt."""

    parent: int
    message_hashes: tuple[str, ...]
    input_hash: str
    agent_id: str | None

    def repeats(self, other: Turn) -> bool:
        """Is it a sibling's input, of the same agent, once more?"""
        return (self.parent, self.agent_id) == (other.history_parent, other.agent_id)


def _cause(session: Session, turn: NewTurn, has_siblings: bool, carries: int | None) -> BranchCause:
    if carries is not None:
        return "compaction"
    before = session.turns[turn.parent] if turn.parent else next(iter(session.turns))
    if turn.agent_id != before.agent_id:
        return "agent"
    if not turn.parent:
        return "root"
    return "fork" if has_siblings else "drift"


def _carried(session: Session, index: TreeIndex, turn: NewTurn) -> int | None:
    """The newest turn whose reply is among the new messages, and which the turn does not continue."""
    own: set[int] | None = None
    for message_hash in turn.message_hashes:
        for number in index.sampled(message_hash):
            own = own if own is not None else set(session.line(turn.parent)) if turn.parent else set()
            if number not in own:
                return number
    return None


def leaves(turns: Turns | Sequence[Turn]) -> list[Turn]:
    """The turns whose tokens none of the given turns continues, by branch: each ends a row."""
    given = list(turns)
    continued = {turn.token_parent for turn in given}
    return sorted((turn for turn in given if turn.number not in continued), key=lambda turn: turn.branch)


SegmentCause = Literal["drift", "divergence"]


class Plan(msgspec.Struct, frozen=True):
    """Where a request joins: after live turn `parent` (0: at the beginning).

    Its first `base_messages` messages are stored ones; the `discarded` turns end if it commits.
    """

    parent: int
    base_messages: int
    discarded: tuple[int, ...] = ()


# What differs between a session of one live path and a tree of branches.


def segment_of(session: Session, plan: Plan, base: int, branch: Branch) -> tuple[int, SegmentCause | None]:
    """The segment of a turn that continues `base` tokens (messages, of text alone) of its parent, and the cause if it
    begins here. In a tree it is the branch; else segments are numbered along the live path, so that a discarded one
    leaves no gap."""
    if session.is_tree:
        return branch.number, "drift" if branch.cause == "drift" else None
    if plan.parent == 0:
        return 0, None
    segment = session.turns[plan.parent].segment
    return (segment, None) if base else (segment + 1, "drift" if plan.base_messages else "divergence")


def rolled_back(session: Session, number: int) -> int:
    """How many live turns the commit of turn `number` rolled back: those from its parent to the previous leaf."""
    if session.is_tree:
        return 0
    parent, count = session.turn(number).parent, 0
    before = next((turn for turn in reversed(session.turns) if turn.number < number), None)
    while before is not None and before.number > parent:
        before, count = session.turns.get(before.parent), count + 1
    return count


def superseded(session: Session) -> set[int]:
    """The turns that no row is made of, unless all branches are asked for: in a linear session those off the live
    path."""
    if not session.is_tree:
        live = set(session.path)
        return {turn.number for turn in session.turns if turn.number not in live}
    parents = {turn.history_parent for turn in session.turns}
    continued: dict[tuple[int, str, str | None], list[Turn]] = defaultdict(list)  # Equal requests may be many.
    for turn in session.turns:
        if turn.number in parents:
            continued[turn.history_parent, turn.body_hash, turn.agent_id].append(turn)
    return {
        turn.number
        for turn in session.turns
        if (alike := continued.get((turn.history_parent, turn.body_hash, turn.agent_id)))
        and _is_repeated(turn, alike, parents.__contains__)
    }


def superseded_payloads(session: Session, index: TreeIndex) -> Collection[int]:
    """The turns with payloads that are superseded; `index` may lack the newest turn. In a tree not those alone that the
    newest turn has superseded: a turn in flight that continued one may have kept it."""
    if session.is_tree:
        return {number for number in session.payloads if is_superseded(session, index, number)}
    newest = session.turns.newest
    if newest is None or not session.payloads:
        return ()
    live, at, oldest = set[int](), newest.number, min(session.payloads)
    while at >= oldest and at:
        live.add(at)
        at = session.turn(at).parent
    return session.payloads.keys() - live


def is_superseded(session: Session, index: TreeIndex, number: int) -> bool:
    """Is a turn of a tree among the `superseded`? `index` may lack the newest turn."""
    newest, turn = session.turns.newest, session.turns.get(number)
    if newest is None or turn is None:  # A restore has undone it.
        return False
    alike = (session.turn(other) for other in index.with_body(turn.body_hash) if other in session.turns)
    return _is_repeated(turn, alike, lambda other: other == newest.history_parent or index.has_children(other))


def _is_repeated(turn: Turn, alike: Iterable[Turn], has_child: Callable[[int], bool]) -> bool:
    """Is a childless turn superseded by one of those with its body: a sibling of its agent that was opened after it had
    committed, and has a child?"""
    return not has_child(turn.number) and any(has_child(other.number) and other.supersedes(turn) for other in alike)


def diverging(session: Session, error: HistoryMismatch | RollbackTooDeep) -> Plan:
    """Where a request joins that diverges from the stored history: it begins a segment, if the session allows that."""
    if session.config.on_divergence == "segment" and session.leaf is not None:
        return Plan(session.leaf.number, 0)
    raise error
