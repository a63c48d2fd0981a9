"""Stored replies that a client returns in another spelling, or leaves out. An exact spelling is told by its hash, and
wins; what differs is looked at among the replies to the same messages alone."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from app.domain.session import Session
from app.domain.tree import TreeIndex
from app.domain.turns import Turn

EMPTY_REPLY = hashlib.sha256(b'["assistant","",[],null]').hexdigest()[:32]
"""The canonical hash (`tolerant`) of a reply with neither text nor calls."""


class ReturnedMessages(Protocol):
    """A request's messages as its client spells them. `bare_hash` is the hash of an assistant's message without its
    leading reasoning; None if it has none."""

    def __len__(self) -> int: ...

    def role(self, place: int) -> str: ...

    def own_hash(self, place: int) -> str: ...

    def bare_hash(self, place: int) -> str | None: ...


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

    def spelled_as(self, request: ReturnedMessages, before: str, place: int) -> str:
        """Message `place` is no reply's exact spelling: the hash of the one reply to the messages before it, whose
        running hash is `before`, that it is but for leading reasoning; else its own without that, as a reply that
        a client carries into another conversation may come back in several spellings.

        Of several, one that the request proves to hold, one that was continued as the request goes on, or the agent's
        own must tell which it is.
        """
        bare = request.bare_hash(place) or request.own_hash(place)
        replies = self._index.with_input(before)
        alike = self._live(turn for turn in replies if bare in (turn.message_hashes[-1], turn.bare_hash))
        for told in (
            [turn for turn in alike if turn.number in self._proven],
            [turn for turn in alike if self._is_continued(turn, request, place + 1)],
            [turn for turn in alike if turn.agent_id == self._agent_id],
        ):
            alike = [turn for turn in alike if turn in told] or alike
        hashes = {turn.message_hashes[-1] for turn in alike}
        return hashes.pop() if len(hashes) == 1 else bare

    def left_out(self, request: ReturnedMessages, running: Mapping[int, str], start: int) -> tuple[int, Turn] | None:
        """The place at which the request leaves out an empty reply, and that reply's turn; None if it does not.

        The request goes on behind the turn's whole input, and continues no deeper turn. `running[n]` is the running
        hash of its first n messages, `start` the smallest n.
        """
        index, whole = self._index, running[len(request)]
        if index.has_input(whole) or index.has_ending(whole):
            return None
        for place in range(len(request) - 1, start - 1, -1):
            before = running[place]
            if index.has_input(before) and request.role(place) != "assistant":
                turn = self._empty_of(before, request, place)
                if turn is not None:
                    return place, turn
            if index.has_ending(before):
                return None
        return None

    def _empty_of(self, before: str, request: ReturnedMessages, place: int) -> Turn | None:
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

    def _is_continued(self, turn: Turn, request: ReturnedMessages, place: int) -> bool:
        """Do the messages from `place` on begin with a call's result that `turn` was continued with, or with the input
        and the reply of a turn that continues it?"""
        is_result = place < len(request) and request.role(place) == "tool"
        children = self._index.siblings(turn.number)
        return any(
            _has_at(request, place, child.message_hashes[:1] if is_result else child.message_hashes)
            for child in children
        )

    def _repeats_child(self, turn: Turn, request: ReturnedMessages, place: int) -> bool:
        return any(_has_at(request, place, child.input_hashes) for child in self._index.siblings(turn.number))

    def _has_child(self, turn: Turn) -> bool:
        return self._index.has_children(turn.number) if self._linear is None else turn is not self._linear.leaf

    def _live(self, turns: Iterable[Turn]) -> list[Turn]:
        turns = list(turns)
        if not turns or self._linear is None:
            return turns
        path = set(self._linear.path)
        return [turn for turn in turns if turn.number in path]


def _has_at(request: ReturnedMessages, place: int, hashes: Sequence[str]) -> bool:
    end = place + len(hashes)
    return len(request) >= end and all(request.own_hash(at) == own for at, own in enumerate(hashes, place))
