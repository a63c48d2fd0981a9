"""Can the replies that many clients of one session saw be put into one order in which each is right?

Every call takes effect at one moment between its start and its end. The search follows Wing and Gong ("Testing and
verifying concurrent objects", 1993): take one of the calls that nothing unplaced precedes in real time, see whether the
model gives that reply there, go on, and go back where it does not; states that were seen before are not searched again.

The model is a linear session as docs/concepts.md and docs/matching.md tell it: a chain of committed turns of which a
retry, which follows a sampled message or repeats an input, may discard the newest few, a flag that says closed, and the
keys of the turns that committed. Their numbers only grow: a turn that does not commit leaves a gap. A request without a
key that repeats the newest turn may be given that turn's reply, which may not have been delivered.

Of a tree nothing is discarded, and a turn follows the deepest one whose history begins its request. That several are in
flight at once is no part of the model: a turn takes effect when it commits, whatever its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.tools.simulation.calls import Audit, Call, Chat, Close, Message, Refused, Seen, Taken, Told


@dataclass(frozen=True)
class Turn:
    """A committed turn. `messages` are its request's new ones, `length` counts its whole history with its reply.

    `parent` is its parent's place among the turns, from 1; 0: it has none. `number`, `text` and `digest` are None until
    a reply has told them.
    """

    number: int | None
    parent: int
    body: str
    key: str | None
    messages: tuple[Message, ...]
    length: int
    text: str | None
    digest: str | None

    def told(self, reply: Taken) -> Turn | None:
        """With what is known now; None where that contradicts what was known."""
        if self.text not in (None, reply.text) or self.digest not in (None, reply.digest):
            return None
        return replace(self, number=reply.turn, text=reply.text, digest=reply.digest)


@dataclass(frozen=True)
class State:
    """`turns` in the order of commits; `leaf` is the newest, the end of the path that a look shows."""

    turns: tuple[Turn, ...] = ()
    leaf: int = 0
    closed: bool = False
    is_tree: bool = False

    def path(self) -> list[int]:
        """The live turns' places, oldest first."""
        numbers: list[int] = []
        number = self.leaf
        while number:
            numbers.append(number)
            number = self.turns[number - 1].parent
        return numbers[::-1]

    def keyed(self, key: str | None) -> int | None:
        if key is None:
            return None
        return next((number for number, turn in enumerate(self.turns, 1) if turn.key == key), None)

    def with_turn(self, number: int, turn: Turn) -> State:
        return replace(self, turns=(*self.turns[: number - 1], turn, *self.turns[number:]))

    def numbered(self, place: int, number: int) -> State | None:
        """With the number of the turn at a place; None where it cannot be that."""
        turn = self.turns[place - 1]
        if turn.number is not None:
            return self if turn.number == number else None
        after = self.with_turn(place, replace(turn, number=number))
        return after if after.is_in_order() else None

    def is_in_order(self) -> bool:
        """Can the turns have the numbers that are known of them? In a tree they need not commit in that order."""
        if self.is_tree:
            known = [turn.number for turn in self.turns if turn.number is not None]
            return len(known) == len(set(known))
        least = 0
        for turn in self.turns:
            least += 1
            if turn.number is not None:
                if turn.number < least:
                    return False
                least = turn.number
        return True


@dataclass(frozen=True)
class Place:
    """Where a chat's history joins: after live turn `parent`, or a refusal's code."""

    parent: int = 0
    refusal: str | None = None


def place(state: State, messages: Sequence[Message], window: int) -> Iterator[tuple[State, Place]]:
    """Every way in which a history may join; more than one only where a stored reply's text is not known yet."""
    if state.is_tree:
        yield from _deepest(state, messages, 0)
        return
    equal = 0
    for number in state.path():
        turn = state.turns[number - 1]
        for stored in turn.messages:
            if equal == len(messages) or messages[equal] != stored:
                yield state, _joined(state, messages, equal, window)
                return
            equal += 1
        if equal == len(messages) or messages[equal][0] != "assistant":
            break
        if turn.text is None:
            yield state, _joined(state, messages, equal, window)
            state = state.with_turn(number, replace(turn, text=messages[equal][1]))
        elif turn.text != messages[equal][1]:
            break
        equal += 1
    yield state, _joined(state, messages, equal, window)


def _deepest(state: State, messages: Sequence[Message], parent: int) -> Iterator[tuple[State, Place]]:
    """After the deepest turn at or below `parent` whose whole history begins the messages."""
    is_sure = False
    for number, turn in enumerate(state.turns, 1):
        since = state.turns[parent - 1].length if parent else 0
        begins = turn.parent == parent and tuple(messages[since : turn.length - 1]) == turn.messages
        if not begins or len(messages) < turn.length or messages[turn.length - 1][0] != "assistant":
            continue
        text = messages[turn.length - 1][1]
        if turn.text in (None, text):
            is_sure |= turn.text == text
            yield from _deepest(state.with_turn(number, replace(turn, text=text)), messages, number)
    if not is_sure:
        yield state, Place(parent)


def _joined(state: State, messages: Sequence[Message], equal: int, window: int) -> Place:
    """The first `equal` of the messages are the stored ones."""
    path = state.path()
    kept = [number for number in path if state.turns[number - 1].length <= equal]
    if len(kept) < len(path):
        repeats_first_input = equal == len(messages) == state.turns[path[0] - 1].length - 1
        if any(role == "assistant" for role, _ in messages[equal:]) or not (kept or repeats_first_input):
            return Place(refusal="history_mismatch")
    if len(path) - len(kept) > window:
        return Place(refusal="rollback_too_deep")
    return Place(parent=kept[-1] if kept else 0)


class Checker:
    """The calls of one session, whose rollback window is `window`; None: it is a tree. `crashes`: the database has
    crashed meanwhile."""

    def __init__(self, calls: Sequence[Call], window: int | None, *, crashes: bool = False) -> None:
        self._needs_rival = CONCURRENT - {"claim_lost"} if crashes else CONCURRENT
        self._calls = sorted(calls, key=lambda call: call.start)
        self._window = window or 0
        self._is_tree = window is None
        audits = [call.reply.turns for call in self._calls if isinstance(call.reply, Told)]
        self._log = max(audits, key=len, default=()) if self._is_tree else ()
        self._must = sum(1 << index for index, call in enumerate(self._calls) if not call.is_open)

    def fault(self) -> str | None:
        """None where an order explains every reply; else the longest prefix that can be explained, and what cannot."""
        for call in self._calls:
            if isinstance(call.reply, Refused) and call.reply.code in self._needs_rival and not self._rivals(call):
                return f"no other turn was in flight meanwhile: {call}"
        best = 0
        seen: set[tuple[int, State]] = set()
        todo: list[tuple[int, State]] = [(0, State(is_tree=self._is_tree))]
        while todo:
            placed, state = todo.pop()
            placed, state = self._observe(placed, state)
            if placed & self._must == self._must:
                return None
            if (placed, state) in seen:
                continue
            seen.add((placed, state))
            best = max(best, placed, key=lambda mask: (mask & self._must).bit_count())
            todo += [
                (placed | 1 << index, after)
                for index in self._next(placed)
                for after in self._effects(state, self._calls[index])
            ]
        left = [call for index, call in enumerate(self._calls) if not best >> index & 1 and not call.is_open]
        return f"{(best & self._must).bit_count()} of {self._must.bit_count()} replies explained, not: {left[:4]}"

    def _rivals(self, call: Call) -> list[Chat]:
        """The chats that were in flight at some moment of the call's."""
        return [
            other.request
            for other in self._calls
            if other is not call
            and isinstance(other.request, Chat)
            and other.start <= call.end
            and other.until >= call.start
        ]

    def _next(self, placed: int) -> list[int]:
        """The unplaced calls that began before any unplaced one ended."""
        left = [index for index in range(len(self._calls)) if not placed >> index & 1]
        first_end = min(self._calls[index].until for index in left)
        return [index for index in left if self._calls[index].start <= first_end]

    def _observe(self, placed: int, state: State) -> tuple[int, State]:
        """Place all replies that are right here and change nothing: to wait with one could never help another."""
        again = True
        while again:
            again = False
            for index in self._next(placed) if placed.bit_count() < len(self._calls) else ():
                call = self._calls[index]
                if not call.is_open and state in self._effects(state, call):
                    placed |= 1 << index
                    again = True
        return placed, state

    def _effects(self, state: State, call: Call) -> list[State]:
        """The states in which the call may leave the session if this is its moment; none where its reply is wrong."""
        request, reply = call.request, call.reply
        if isinstance(request, Chat):
            if isinstance(reply, Refused) and not call.is_open:
                return [state] if self._is_refused(state, call, request, reply.code) else []
            after = self._chat(state, request, reply if isinstance(reply, Taken) else None)
            return [one for one in after if self._is_as_logged(one)]
        if isinstance(reply, Refused) and not call.is_open:
            explained = state.closed and reply.code == "session_closed" and not isinstance(request, Audit)
            return [state] if explained else []
        if isinstance(request, Close):
            return [] if state.closed else [replace(state, closed=True)]
        if isinstance(reply, Seen):
            texts = [state.turns[number - 1].text for number in state.path()]
            same = len(texts) == len(reply.texts) and not state.closed
            return list(_learned(state, reply.texts)) if same else []
        if isinstance(reply, Told):
            return list(_audited(state, reply)) if state.closed == reply.closed else []
        return []

    def _is_refused(self, state: State, call: Call, chat: Chat, code: str) -> bool:
        """Is this refusal right here? In the order of the checks: 404, 409 and 422, then the history."""
        if state.closed or code == "session_closed":
            return state.closed and code == "session_closed"
        if code in CONCURRENT:
            return True
        if code == "idempotency_mismatch":
            used = [(turn.key, turn.body) for turn in state.turns]
            used += [(rival.key, rival.body) for rival in self._rivals(call)]
            return any(key == chat.key and body != chat.body for key, body in used)
        if state.keyed(chat.key) is not None:
            return False
        return any(joins.refusal == code for _, joins in place(state, chat.messages, self._window))

    def _is_as_logged(self, state: State) -> bool:
        """Is the newest turn at its place in the longest audit? Turns of a tree may else commit in many orders."""
        place = len(state.turns)
        if not 0 < place <= len(self._log):
            return True
        turn, (number, parent, body) = state.turns[-1], self._log[place - 1]
        after = self._log[turn.parent - 1][0] if turn.parent else 0
        return (after, turn.body) == (parent, body) and turn.number in (None, number)

    def _chat(self, state: State, chat: Chat, reply: Taken | None) -> Iterator[State]:
        """The states after a chat that took, or joined, a turn; `reply` None where nobody heard of it."""
        if state.closed:
            return
        repeated = state.keyed(chat.key)
        if reply is not None and reply.replayed:
            places = [repeated or 0] if chat.key else range(1, state.leaf + 1) if state.is_tree else [state.leaf]
            for one in places:
                yield from _given_again(state, one, chat, reply)
        elif repeated is None:
            for known, joins in place(state, chat.messages, self._window):
                if joins.refusal is None:
                    yield from _committed(known, joins.parent, chat, reply)


CONCURRENT = frozenset({"session_busy", "claim_lost"})
"""What a turn is told because of another one; they change nothing and are right only beside another turn. But a crash
of the database may undo a claim that no other turn wanted."""


def _given_again(state: State, repeated: int, chat: Chat, reply: Taken) -> Iterator[State]:
    """The state after the reply of the turn at this place (0: none), if it is a reply to this chat."""
    if repeated and state.turns[repeated - 1].body == chat.body:
        numbered = state.numbered(repeated, reply.turn)
        told = None if numbered is None else numbered.turns[repeated - 1].told(reply)
        if numbered is not None and told is not None:
            yield numbered.with_turn(repeated, told)


def _committed(state: State, parent: int, chat: Chat, reply: Taken | None) -> Iterator[State]:
    since = state.turns[parent - 1].length if parent else 0
    new = Turn(None, parent, chat.body, chat.key, chat.messages[since:], len(chat.messages) + 1, None, None)
    told = new if reply is None else new.told(reply)
    assert told is not None
    after = replace(state, turns=(*state.turns, told), leaf=len(state.turns) + 1)
    if after.is_in_order():
        yield after


def _audited(state: State, told: Told) -> Iterator[State]:
    places = {number: place for place, (number, _, _) in enumerate(told.turns, 1)}
    parents = [(places.get(parent, 0), body) for _, parent, body in told.turns]
    if parents != [(turn.parent, turn.body) for turn in state.turns]:
        return
    known: State | None = state
    for place, (number, _, _) in enumerate(told.turns, 1):
        known = None if known is None else known.numbered(place, number)
    if known is not None:
        yield known


def _learned(state: State, texts: Sequence[str]) -> Iterator[State]:
    for number, text in zip(state.path(), texts, strict=True):
        turn = state.turns[number - 1]
        if turn.text not in (None, text):
            return
        state = state.with_turn(number, replace(turn, text=text))
    yield state


def fault(calls: Sequence[Call], window: int | None, *, crashes: bool = False) -> str | None:
    """Why the history of one session is not linearizable; None where it is. `window`, `crashes` as in `Checker`."""
    return Checker(calls, window, crashes=crashes).fault()
