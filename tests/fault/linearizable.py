"""Can the replies that many clients of one session saw be put into one order in which each is right?

Every call takes effect at one moment between its start and its end. The search follows Wing and Gong ("Testing and
verifying concurrent objects", 1993): take one of the calls that nothing unplaced precedes in real time, see whether the
model gives that reply there, go on, and go back where it does not; states that were seen before are not searched again.

The model is the session as docs/concepts.md and docs/matching.md tell it: a chain of committed turns of which a retry,
which follows a sampled message or repeats an input, may discard the newest few, a flag that says closed, and the keys
of the turns that committed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

Message: TypeAlias = tuple[str, str]
"""Role and text."""


@dataclass(frozen=True)
class Chat:
    """One chat request: its whole history, what its body hashes to, and its Idempotency-Key."""

    messages: tuple[Message, ...]
    body: str
    key: str | None = None


@dataclass(frozen=True)
class Close:
    """`DELETE /sessions/{id}`."""


@dataclass(frozen=True)
class Look:
    """`GET /sessions/{id}`: the live turns."""


@dataclass(frozen=True)
class Audit:
    """`GET /sessions/{id}/events`: every turn that was ever committed, and whether the session is closed."""


@dataclass(frozen=True)
class Taken:
    """A 200 to a chat: which turn it is, its message, a hash of its bytes, and whether it says that it was replayed."""

    turn: int
    text: str
    digest: str
    replayed: bool = False


@dataclass(frozen=True)
class Seen:
    """A 200 to a look: the texts of the live turns' replies."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """A 200 to an audit: of each committed turn its parent and its request's body."""

    turns: tuple[tuple[int, str], ...]
    closed: bool


@dataclass(frozen=True)
class Done:
    """A 204."""


@dataclass(frozen=True)
class Refused:
    """An error; `code` is that of docs/api.md."""

    status: int
    code: str


Request = Chat | Close | Look | Audit
Reply = Taken | Seen | Told | Done | Refused


@dataclass(frozen=True)
class Call:
    """`reply` None, or a 5xx: it may have taken effect at any moment since `start`, or never."""

    start: float
    end: float
    request: Request
    reply: Reply | None

    @property
    def is_open(self) -> bool:
        return self.reply is None or (isinstance(self.reply, Refused) and self.reply.status >= 500)

    @property
    def until(self) -> float:
        return math.inf if self.is_open else self.end


@dataclass(frozen=True)
class Turn:
    """A committed turn. `messages` are its request's new ones, `length` counts its whole history with its reply.

    `text` and `digest` are None until a reply has told them.
    """

    parent: int
    body: str
    key: str | None
    messages: tuple[Message, ...]
    length: int
    text: str | None
    digest: str | None

    def told(self, text: str, digest: str) -> Turn | None:
        """With what is known now; None where that contradicts what was known."""
        if self.text not in (None, text) or self.digest not in (None, digest):
            return None
        return replace(self, text=text, digest=digest)


@dataclass(frozen=True)
class State:
    turns: tuple[Turn, ...] = ()
    leaf: int = 0
    closed: bool = False

    def path(self) -> list[int]:
        """The live turns' numbers, oldest first."""
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


@dataclass(frozen=True)
class Place:
    """Where a chat's history joins: after live turn `parent`, or a refusal's code."""

    parent: int = 0
    refusal: str | None = None


def place(state: State, messages: Sequence[Message], window: int) -> Iterator[tuple[State, Place]]:
    """Every way in which a history may join; more than one only where a stored reply's text is not known yet."""
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
    """The calls of one session, whose rollback window is `window`."""

    def __init__(self, calls: Sequence[Call], window: int) -> None:
        self._calls = sorted(calls, key=lambda call: call.start)
        self._window = window
        self._must = sum(1 << index for index, call in enumerate(self._calls) if not call.is_open)

    def fault(self) -> str | None:
        """None where an order explains every reply; else the longest prefix that can be explained, and what cannot."""
        for call in self._calls:
            if isinstance(call.reply, Refused) and call.reply.code in CONCURRENT and not self._rivals(call):
                return f"no other turn was in flight meanwhile: {call}"
        best = 0
        seen: set[tuple[int, State]] = set()
        todo: list[tuple[int, State]] = [(0, State())]
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
            return list(self._chat(state, request, reply if isinstance(reply, Taken) else None))
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
            told = tuple((turn.parent, turn.body) for turn in state.turns)
            return [state] if (told, state.closed) == (reply.turns, reply.closed) else []
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

    def _chat(self, state: State, chat: Chat, reply: Taken | None) -> Iterator[State]:
        """The states after a chat that took, or joined, a turn; `reply` None where nobody heard of it."""
        if state.closed:
            return
        repeated = state.keyed(chat.key)
        if repeated is not None:
            turn = state.turns[repeated - 1]
            if reply is not None and reply.replayed and (reply.turn, chat.body) == (repeated, turn.body):
                told = turn.told(reply.text, reply.digest)
                if told is not None:
                    yield state.with_turn(repeated, told)
            return
        for known, joins in place(state, chat.messages, self._window):
            if joins.refusal is None and _is_next(state, reply):
                yield _committed(known, joins.parent, chat, reply)


CONCURRENT = frozenset({"session_busy", "claim_lost"})
"""What a turn is told because of another one; they change nothing and are right only beside another turn."""


def _is_next(state: State, reply: Taken | None) -> bool:
    return reply is None or (not reply.replayed and reply.turn == len(state.turns) + 1)


def _committed(state: State, parent: int, chat: Chat, reply: Taken | None) -> State:
    since = state.turns[parent - 1].length if parent else 0
    text, digest = (None, None) if reply is None else (reply.text, reply.digest)
    new = Turn(parent, chat.body, chat.key, chat.messages[since:], len(chat.messages) + 1, text, digest)
    return replace(state, turns=(*state.turns, new), leaf=len(state.turns) + 1)


def _learned(state: State, texts: Sequence[str]) -> Iterator[State]:
    for number, text in zip(state.path(), texts, strict=True):
        turn = state.turns[number - 1]
        if turn.text not in (None, text):
            return
        state = state.with_turn(number, replace(turn, text=text))
    yield state


def fault(calls: Sequence[Call], window: int) -> str | None:
    """Why the history of one session is not linearizable; None where it is."""
    return Checker(calls, window).fault()
