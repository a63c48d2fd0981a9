"""The model of a session whose calls are searched for an order: its turns, and where a request joins them.

A linear session is as docs/concepts.md tells it: a chain of committed turns of which a retry, which
follows a sampled message or repeats an input, may discard the newest few; another history is refused or begins a
segment. Its turns' numbers only grow: a turn that does not commit leaves a gap. Of a tree nothing is discarded, and a
turn follows the deepest one whose history begins its request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.tools.simulation.calls import Message, Taken


@dataclass(frozen=True)
class Rules:
    """`window` is the rollback window, None in a tree; with `segments` a history that diverges begins one."""

    window: int | None
    segments: bool = False


@dataclass(frozen=True)
class Turn:
    """A committed turn. `messages` are its request's new ones, `length` counts its whole history with its reply.

    `parent` and `history` are the places, from 1, of its parent and of the turn whose history it continues; 0: it has
    none. `number`, `text` and `digest` are None until a reply has told them.
    """

    number: int | None
    parent: int
    history: int
    body: str
    key: str | None
    agent: str | None
    retry_count: int
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
    """`turns` in the order of commits; `leaf` is the newest, the end of the path that a look shows.

    A session that is `closed` but not `created` can no longer be, because its root has ended.
    """

    turns: tuple[Turn, ...] = ()
    leaf: int = 0
    closed: bool = False
    is_tree: bool = False
    created: bool = True
    erased: bool = False

    def chain(self) -> list[int]:
        """The places of the turns that the newest one's history is made of, oldest first."""
        places: list[int] = []
        place = self.leaf
        while place:
            places.append(place)
            place = self.turns[place - 1].history
        return places[::-1]

    def keyed(self, key: str | None) -> int | None:
        if key is None:
            return None
        return next((place for place, turn in enumerate(self.turns, 1) if turn.key == key), None)

    def with_turn(self, place: int, turn: Turn) -> State:
        return replace(self, turns=(*self.turns[: place - 1], turn, *self.turns[place:]))

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
    """Where a chat joins: after the turn at `parent`, with the history of that at `history`; or a refusal's code."""

    parent: int = 0
    history: int = 0
    refusal: str | None = None


def place(state: State, messages: Sequence[Message], agent: str | None, rules: Rules) -> Iterator[tuple[State, Place]]:
    """Every way in which a history may join; more than one only where a stored reply's text is not known yet."""
    if state.is_tree:
        yield from _preferred(_deepest(state, messages, 0), agent)
        return
    equal = 0
    for number in state.chain():
        turn = state.turns[number - 1]
        for stored in turn.messages:
            if equal == len(messages) or messages[equal] != stored:
                yield state, _joined(state, messages, equal, rules)
                return
            equal += 1
        if equal == len(messages) or messages[equal][0] != "assistant":
            break
        if turn.text is None:
            yield state, _joined(state, messages, equal, rules)
            state = state.with_turn(number, replace(turn, text=messages[equal][1]))
        elif turn.text != messages[equal][1]:
            break
        equal += 1
    yield state, _joined(state, messages, equal, rules)


def _deepest(state: State, messages: Sequence[Message], parent: int) -> Iterator[tuple[State, Place]]:
    """After the deepest turns at or below `parent` whose whole history begins the messages."""
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
        yield state, Place(parent, parent)


def _preferred(ways: Iterator[tuple[State, Place]], agent: str | None) -> Iterator[tuple[State, Place]]:
    """Of those that need the same to be true: the deepest, then one of the same agent, then the newest."""
    best: dict[State, tuple[int, bool, int]] = {}
    for state, joins in ways:
        turn = state.turns[joins.parent - 1] if joins.parent else None
        rank = (0, False, 0) if turn is None else (turn.length, turn.agent == agent, joins.parent)
        best[state] = max(best.get(state, rank), rank)
    for state, (_, _, parent) in best.items():
        yield state, Place(parent, parent)


def _joined(state: State, messages: Sequence[Message], equal: int, rules: Rules) -> Place:
    """The first `equal` of the messages are the stored ones."""
    chain = state.chain()
    kept = [number for number in chain if state.turns[number - 1].length <= equal]
    gone = chain[len(kept) :]
    refusal = None
    if gone:
        repeats_first_input = equal == len(messages) == state.turns[chain[0] - 1].length - 1
        if any(role == "assistant" for role, _ in messages[equal:]) or not (kept or repeats_first_input):
            refusal = "history_mismatch"
    if refusal is None and len(gone) > (rules.window or 0):
        refusal = "rollback_too_deep"
    if refusal is not None:
        return Place(state.leaf) if rules.segments else Place(refusal=refusal)
    return Place(state.turns[gone[0] - 1].parent if gone else state.leaf, kept[-1] if kept else 0)
