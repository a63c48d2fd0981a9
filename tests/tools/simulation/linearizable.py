"""Can the replies that many clients of one session saw be put into one order in which each is right?

Every call takes effect at one moment between its start and its end. The search follows Wing and Gong ("Testing and
verifying concurrent objects", 1993): take one of the calls that nothing unplaced precedes in real time, see whether the
model gives that reply there, go on, and go back where it does not; states that were seen before are not searched again.

The model is `session_model`, with flags that say created, closed and erased, and the keys of the turns that committed.
A request without a key that repeats the newest turn (of a tree: any) may be given that turn's reply, which may not have
been delivered; in a linear session one that a client marks as a retry must be, and an attempt that came late may be
given the turn of a later attempt. That several turns are in flight at once is no part of the model: a turn takes effect
when it commits, whatever its number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tests.tools.simulation.calls import (
    UNCHANGED,
    Audit,
    Call,
    Chat,
    Close,
    Create,
    Done,
    Erase,
    Message,
    Numbers,
    Refused,
    Reply,
    Request,
    Reward,
    Shown,
    Taken,
    Told,
)
from tests.tools.simulation.session_model import Rules, State, Turn, place


class TooLong(Exception):
    """The search was given up."""


class Checker:
    """The calls of one session. `needs_rival` are the codes of refusals that are right only beside another turn;
    `begins` is the session before the calls; `most`: after so many states the search is given up."""

    def __init__(
        self,
        calls: Sequence[Call],
        rules: Rules,
        *,
        needs_rival: Collection[str] = (),
        begins: State | None = None,
        most: int | None = None,
    ) -> None:
        self._needs_rival = needs_rival
        self._rules = rules
        self._begins = begins or State(is_tree=rules.window is None)
        self._most = most
        audits = [call.reply.turns for call in calls if isinstance(call.reply, Told)]
        self._log = max(audits, key=len, default=())
        self._calls = sorted((call for call in calls if self._may_matter(call)), key=lambda call: call.start)
        self._must = sum(1 << index for index, call in enumerate(self._calls) if not call.is_open)

    def _may_matter(self, call: Call) -> bool:
        """Not one whose turn is known, and was never committed."""
        if not call.is_open or not isinstance(call.request, Chat) or call.request.number is None:
            return True
        return call.request.number in {number for number, _, _ in self._log}

    def fault(self) -> str | None:
        """None where an order explains every reply; else the longest prefix that can be explained, and what cannot.

        Raises TooLong.
        """
        for call in self._calls:
            if isinstance(call.reply, Refused) and call.reply.code in self._needs_rival and not self._rivals(call):
                return f"no other turn was in flight meanwhile: {call}"
        best = 0
        seen: set[tuple[int, State]] = set()
        todo: list[tuple[int, State]] = [(0, self._begins)]
        while todo:
            placed, state = todo.pop()
            placed, state = self._observe(placed, state)
            if placed & self._must == self._must:
                return None
            if (placed, state) in seen:
                continue
            seen.add((placed, state))
            if self._most is not None and len(seen) > self._most:
                raise TooLong
            best = max(best, placed, key=lambda mask: (mask & self._must).bit_count())
            todo += [
                (placed | 1 << index, after)
                for index in sorted(self._next(placed), key=lambda index: -self._calls[index].until)
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
        if isinstance(reply, Refused) and not call.is_open:
            if isinstance(request, Chat):
                return [state] if self._is_refused(state, call, request, reply.code) else []
            return [state] if _is_ended(state, request, reply.code) else []
        if isinstance(request, Chat):
            after = self._chat(state, request, reply if isinstance(reply, Taken) else None)
            return [one for one in after if self._is_as_logged(one)]
        if call.is_open or isinstance(reply, Done):
            return _changed(state, request, is_open=call.is_open)
        if not state.created:
            return [state] if reply == Told((), closed=False) else []
        return list(_observed(state, reply))

    def _is_refused(self, state: State, call: Call, chat: Chat, code: str) -> bool:
        """Is this refusal right here? In the order of the checks: 404, 409 and 422, then the history."""
        if code in UNCHANGED:
            return True
        if code == "session_not_found" or not state.created:
            return not state.created and code == "session_not_found"
        if state.closed or code in ENDED:
            return state.closed and code in ENDED
        if code in CONCURRENT:
            return True
        if code == "idempotency_mismatch":
            used = [(turn.key, turn.body) for turn in state.turns]
            used += [(rival.key, rival.body) for rival in self._rivals(call)]
            return any(key == chat.key and body != chat.body for key, body in used)
        if state.keyed(chat.key) is not None or _is_owed(state, chat):
            return False
        return any(joins.refusal == code for _, joins in place(state, chat.messages, chat.agent, self._rules))

    def _is_as_logged(self, state: State) -> bool:
        """Is the newest turn at its place in the longest audit? Turns of a tree may else commit in many orders."""
        newest = len(state.turns)
        if not 0 < newest <= len(self._log):
            return True
        turn, (number, parent, body) = state.turns[-1], self._log[newest - 1]
        after = self._log[turn.parent - 1][0] if turn.parent else 0
        return (after, turn.body) == (parent, body) and turn.number in (None, number)

    def _chat(self, state: State, chat: Chat, reply: Taken | None) -> Iterator[State]:
        """The states after a chat that took, or joined, a turn; `reply` None where nobody heard of it."""
        if state.closed or not state.created:
            return
        if reply is not None and reply.replayed:
            for one in _repeated(state, chat):
                yield from _given_again(state, one, chat, reply)
        elif state.keyed(chat.key) is None and not _is_owed(state, chat):
            for known, joins in place(state, chat.messages, chat.agent, self._rules):
                if joins.refusal is None:
                    yield from _committed(known, joins.parent, joins.history, chat, reply)


CONCURRENT = frozenset({"session_busy", "claim_lost"})
"""What a turn is told because of another one; they change nothing and are right only beside another turn. But a crash
of the database may undo a claim that no other turn wanted."""


ENDED = frozenset({"session_closed", "session_reclaimed"})


def _is_alike(one: Turn | Chat, chat: Chat) -> bool:
    return (one.body, one.agent) == (chat.body, chat.agent)


def _is_owed(state: State, chat: Chat) -> bool:
    """Must it be given the newest turn's reply, as a retry of it that its client marks?"""
    return chat.is_marked and not state.is_tree and state.leaf > 0 and _is_alike(state.turns[state.leaf - 1], chat)


def _is_ended(state: State, request: Request, code: str) -> bool:
    """Is it right that the session is not there for the request, or there no more?"""
    if code == "session_not_found":
        return not state.created and not isinstance(request, Create)
    is_gone = state.erased if isinstance(request, Reward) else state.closed
    return code in ENDED and is_gone and not isinstance(request, (Audit, Erase))


def _changed(state: State, request: Request, *, is_open: bool) -> list[State]:
    """The state after a request that is not about turns, if it is done; none where it cannot be."""
    if isinstance(request, Create):
        return [] if state.closed else [replace(state, created=True)]
    if isinstance(request, Close) and request.with_root:
        return [] if state.closed and is_open else [replace(state, closed=True)]
    if not state.created:
        return [state] if isinstance(request, Erase) and request.with_root and not is_open else []
    if isinstance(request, Close):
        return [] if state.closed else [replace(state, closed=True)]
    if isinstance(request, Erase):
        return [replace(state, closed=True, erased=True)]
    return [state] if isinstance(request, Reward) and not state.erased and not is_open else []


def _observed(state: State, reply: Reply | None) -> Iterator[State]:
    """The state after a look or an audit, if it may show that."""
    if isinstance(reply, Shown) and not state.closed:
        texts = _texts(state, reply.messages)
        if texts is not None and len(texts) == len(state.chain()):
            yield from _learned(state, texts)
    elif isinstance(reply, Numbers):
        known = {turn.number for turn in state.turns} - {None}
        if len(reply.turns) == len(state.turns) and known <= reply.turns and not state.closed:
            yield state
    elif isinstance(reply, Told) and state.closed == reply.closed:
        yield from _audited(state, reply)


def _repeated(state: State, chat: Chat) -> list[int]:
    """The places of the turns whose reply it may be given (0: of none)."""
    if chat.key is not None:
        return [state.keyed(chat.key) or 0]
    return [
        number
        for number, turn in enumerate(state.turns, 1)
        if state.is_tree or number == state.leaf or turn.retry_count > chat.retry_count
    ]


def _given_again(state: State, repeated: int, chat: Chat, reply: Taken) -> Iterator[State]:
    """The state after the reply of the turn at this place (0: none), if it is a reply to this chat."""
    if repeated and _is_alike(state.turns[repeated - 1], chat):
        numbered = state.numbered(repeated, reply.turn)
        told = None if numbered is None else numbered.turns[repeated - 1].told(reply)
        if numbered is not None and told is not None:
            yield numbered.with_turn(repeated, told)


def _committed(state: State, parent: int, history: int, chat: Chat, reply: Taken | None) -> Iterator[State]:
    since = state.turns[history - 1].length if history else 0
    new = Turn(
        chat.number,
        parent,
        history,
        chat.body,
        chat.key,
        chat.agent,
        chat.retry_count,
        chat.messages[since:],
        len(chat.messages) + 1,
        None,
        None,
    )
    told = new if reply is None else new.told(reply)
    assert told is not None
    after = replace(state, turns=(*state.turns, told), leaf=len(state.turns) + 1)
    if after.is_in_order():
        yield after


def _audited(state: State, told: Told) -> Iterator[State]:
    places = {number: at for at, (number, _, _) in enumerate(told.turns, 1)}
    parents = [(places.get(parent, 0), body) for _, parent, body in told.turns]
    if parents != [(turn.parent, turn.body) for turn in state.turns]:
        return
    known: State | None = state
    for at, (number, _, _) in enumerate(told.turns, 1):
        known = None if known is None else known.numbered(at, number)
    if known is not None:
        yield known


def _texts(state: State, messages: Sequence[Message]) -> list[str] | None:
    """The texts of the turns' replies in a history; None where it is not that of the newest turn."""
    texts: list[str] = []
    at = 0
    for number in state.chain():
        turn = state.turns[number - 1]
        if len(messages) < turn.length or tuple(messages[at : turn.length - 1]) != turn.messages:
            return None
        texts.append(messages[turn.length - 1][1])
        at = turn.length
    return texts if at == len(messages) else None


def _learned(state: State, texts: Sequence[str]) -> Iterator[State]:
    for number, text in zip(state.chain(), texts, strict=True):
        turn = state.turns[number - 1]
        if turn.text not in (None, text):
            return
        state = state.with_turn(number, replace(turn, text=text))
    yield state
