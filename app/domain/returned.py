"""Stored replies that a client returns in another spelling, or leaves out. An exact spelling is told by its hash, and
wins; what differs is looked at among the replies to the same messages alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

from app.domain.calls import Message, answer_key, ids_of
from app.domain.rules import EMPTY_REPLY, TreeIndex
from app.domain.session import Session, Turn


class Messages(Protocol):
    """What is asked of a request's messages (`app.domain.history.RequestHistory`)."""

    def __len__(self) -> int: ...

    def role(self, index: int) -> str: ...

    def own_hash(self, index: int) -> str: ...

    def bare_hash(self, index: int) -> str | None: ...


def meant_of(
    alike: list[Turn],
    index: TreeIndex,
    agent_id: str | None,
    proven: Container[int],
    is_continued: Callable[[Turn], bool],
) -> Turn | None:
    """The turn whose reply is meant, of those whose reply it may be; None if that cannot be told.

    As long as they have several replies, each test leaves the turns that pass it, if any does. `is_continued`: the
    request goes on as one that continued the turn did; but agents get equal results, so that of an agent that has one
    of the turns, and has not continued it, this is meant.
    """
    own = [turn for turn in alike if turn.agent_id == agent_id]
    for is_meant in (
        lambda turn: turn.number in proven,
        lambda turn: len(own) == 1 and turn is own[0] and not index.has_children(turn.number),
        is_continued,
        lambda turn: turn in own,
    ):
        if len({turn.message_hashes[-1] for turn in alike}) > 1:
            alike = [turn for turn in alike if is_meant(turn)] or alike
    return alike[0] if len({turn.message_hashes[-1] for turn in alike}) == 1 else None


class StoredReplies:
    """The replies that a request of agent `agent_id` may return: those that `index` has, in a linear `session` those
    on its live path. `proven` are the turns that the request proves to hold."""

    def __init__(
        self, index: TreeIndex, session: Session | None, agent_id: str | None, proven: Container[int] = ()
    ) -> None:
        self._index = index
        self._linear = None if session is None or session.is_tree else session
        self._agent_id = agent_id
        self._proven = proven

    def matched_reply(self, request: Messages, before: str, place: int) -> str:
        """Message `place` is no reply's exact spelling: the hash of the one reply to the messages before it, whose
        running hash is `before`, that it is but for leading reasoning; else its own without that, as a reply that
        a client carries into another conversation may come back in several spellings.

        Of several, `meant_of` tells which it is.
        """
        bare = request.bare_hash(place) or request.own_hash(place)
        replies = self._index.with_input(before)
        turn = meant_of(
            self._live(turn for turn in replies if bare in (turn.message_hashes[-1], turn.bare_hash)),
            self._index,
            self._agent_id,
            self._proven,
            lambda turn: self._is_continued(turn, request, place + 1),
        )
        return bare if turn is None else turn.message_hashes[-1]

    def left_out(self, request: Messages, running: Mapping[int, str], start: int) -> tuple[int, Turn] | None:
        """The place at which the request leaves out an empty reply, and that reply's turn; None if it does not.

        The request goes on behind the turn's whole input, and continues no deeper turn. `running[n]` is the running
        hash of its first n messages, `start` the smallest n.
        """
        index, whole = self._index, running[len(request)]
        if whole in index.by_input or whole in index.by_history:
            return None
        for place in range(len(request) - 1, start - 1, -1):
            before = running[place]
            if before in index.by_input and request.role(place) != "assistant":
                turn = self._empty_of(before, request, place)
                if turn is not None:
                    return place, turn
            if before in index.by_history:
                return None
        return None

    def _empty_of(self, before: str, request: Messages, place: int) -> Turn | None:
        """The turn of the empty reply before the request's message `place`: one that was continued as the request goes
        on, else the newest reply that nothing continues, if it is empty, else one whose child the request repeats."""
        replies = self._live(turn for turn in self._index.with_input(before) if turn.agent_id == self._agent_id)
        newest = next((turn for turn in replies if not self._has_child(turn)), None)
        empty = [turn for turn in replies if EMPTY_REPLY in (turn.message_hashes[-1], turn.bare_hash)]
        for told in (
            [turn for turn in empty if self._is_continued(turn, request, place)],
            [turn for turn in empty if turn is newest],
            [turn for turn in empty if self._repeats_child(turn, request, place)],
        ):
            if told:
                return told[0]
        return None

    def _is_continued(self, turn: Turn, request: Messages, place: int) -> bool:
        """Do the messages from `place` on begin with a call's result that `turn` was continued with, or with the input
        and the reply of a turn that continues it?"""
        is_result = place < len(request) and request.role(place) == "tool"
        children = self._index.siblings(turn.number)
        return any(
            _has_at(request, place, child.message_hashes[:1] if is_result else child.message_hashes)
            for child in children
        )

    def _repeats_child(self, turn: Turn, request: Messages, place: int) -> bool:
        return any(_has_at(request, place, child.input_hashes) for child in self._index.siblings(turn.number))

    def _has_child(self, turn: Turn) -> bool:
        return self._index.has_children(turn.number) if self._linear is None else turn is not self._linear.leaf

    def _live(self, turns: Iterable[Turn]) -> list[Turn]:
        return [turn for turn in turns if self._linear is None or turn.number in self._path]

    @functools.cached_property
    def _path(self) -> frozenset[int]:
        return frozenset(() if self._linear is None else self._linear.path)


def _has_at(request: Messages, place: int, hashes: Sequence[str]) -> bool:
    end = place + len(hashes)
    return len(request) >= end and all(request.own_hash(at) == own for at, own in enumerate(hashes, place))


class ReturnedCalls:
    """One request's, from its first message that is looked at to its last.

    `hash_of` is the canonical hash of a message, `is_reply` tells whether one is a turn's reply. `ignores_arguments`:
    where the stored ones are no object, the client's are not compared.
    """

    def __init__(
        self,
        index: TreeIndex,
        hash_of: Callable[[Message], str],
        is_reply: Callable[[Message, Turn], bool],
        proven: Container[int],
        agent_id: str | None,
        *,
        ignores_arguments: bool,
    ) -> None:
        self._index = index
        self._odd = index.odd_calls
        self._hash_of = hash_of
        self._is_reply = is_reply
        self._proven = proven
        self._agent_id = agent_id
        self._ignores_arguments = ignores_arguments
        self._own: dict[str, Any] = {}

    def own_id(self, call_id: Any) -> Any:
        """The engine's id of a call or a result: of this path, else of the session."""
        own = self._own.get(call_id, self) if isinstance(call_id, str) else call_id
        return self._odd.own_id(call_id) if own is self else own

    def sampled_by(self, message: Message, before: str, own_hash: str, results: Sequence[Message]) -> Turn | None:
        """The turn that sampled an assistant's message with calls, if it is known by their ids alone; from here on
        `own_id` knows them. `before` is the running hash of the history before it, `results` are the tools' messages
        behind it."""
        if message["role"] != "assistant":
            return None
        ids = ids_of(message)
        here = list(self._index.with_input(before))
        if exact := [turn for turn in here if turn.message_hashes[-1] == own_hash]:
            odd = next((turn for turn in exact if turn.number in self._odd), None)
            plain = {call_id: call_id for call_id in ids if isinstance(call_id, str)}
            self._own |= plain if odd is None else self._pairs(ids, odd)
            return None
        alike = self._alike(message, here)
        if not alike and not any(self._index.sampled(own_hash)):
            carried = (self._index.turn(number) for number in self._odd.carried(ids))
            alike = self._alike(message, (turn for turn in carried if turn is not None))
        turn = meant_of(
            alike, self._index, self._agent_id, self._proven, lambda turn: self._is_answered(turn, ids, results)
        )
        if turn is not None:
            self._own |= self._pairs(ids, turn)
        return turn

    def _alike(self, message: Message, turns: Iterable[Turn]) -> list[Turn]:
        """Those of the turns whose reply this is, but for ids and arguments."""
        alike = []
        for turn in turns:
            reply_calls = self._odd.reply_calls(turn.number)
            mended = reply_calls and reply_calls.mended(message, with_arguments=self._ignores_arguments)
            if mended and self._is_reply(mended, turn):
                alike.append(turn)
        return alike

    def _is_answered(self, turn: Turn, ids: Sequence[Any], results: Sequence[Message]) -> bool:
        """Has an earlier request continued the turn with these results?"""
        own = self._pairs(ids, turn)
        hashes = tuple(self._hash_of(_answering(result, own)) for result in results)
        children = self._index.siblings(turn.number)
        return bool(hashes) and any(child.message_hashes[: len(hashes)] == hashes for child in children)

    def _pairs(self, ids: Sequence[Any], turn: Turn) -> dict[str, Any]:
        """The engine's ids by the client's."""
        reply_calls = self._odd.reply_calls(turn.number)
        places = None if reply_calls is None else reply_calls.pairs(ids)
        if reply_calls is None or places is None:
            return {}
        own = [call.id for call in reply_calls.calls]
        return {ids[place]: own_id for own_id, place in zip(own, places, strict=True) if isinstance(ids[place], str)}


def _answering(result: Message, own: Mapping[str, Any]) -> Message:
    """A tool's message with the engine's id of the call that it answers."""
    key = answer_key(result)
    answered = result.get(key)
    return {**result, key: own[answered]} if isinstance(answered, str) and answered in own else result
