"""Recognises the calls and results of one request that its client spells otherwise than the engine did.

An exact spelling wins. Else a call is known by its id in any spelling, and where its stored arguments are no object by
id and name alone: clients send other arguments in their place. Where several replies to one input match only so, what
the client proves to hold, a call's result or the agent decides, or nothing does (`returned.meant_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from app.domain.calls import Message, answer_key, ids_of
from app.domain.returned import meant_of
from app.domain.tree import TreeIndex
from app.domain.turns import Turn


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
            alike,
            self._index,
            self._agent_id,
            self._proven,
            lambda turn: self._is_answered(turn, ids, results),
        )
        if turn is not None:
            self._own |= self._pairs(ids, turn)
        return turn

    def _alike(self, message: Message, turns: Iterable[Turn]) -> list[Turn]:
        """Those of the turns whose reply this is, but for ids and arguments."""
        alike = []
        for turn in turns:
            spelling = self._odd.spelling(turn.number)
            mended = spelling and spelling.mended(message, with_arguments=self._ignores_arguments)
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
        spelling = self._odd.spelling(turn.number)
        places = None if spelling is None else spelling.pairs(ids)
        if spelling is None or places is None:
            return {}
        own = [call.id for call in spelling.calls]
        return {ids[place]: own_id for own_id, place in zip(own, places, strict=True) if isinstance(ids[place], str)}


def _answering(result: Message, own: Mapping[str, Any]) -> Message:
    """A tool's message with the engine's id of the call that it answers."""
    key = answer_key(result)
    answered = result.get(key)
    return {**result, key: own[answered]} if isinstance(answered, str) and answered in own else result
