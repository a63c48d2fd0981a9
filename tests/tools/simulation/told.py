"""A session's turns by what is known of them outside the store: the requests, and what the engines sampled. The rules
of histories are told here once more, over plain messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from app.domain.events import Matcher, Recorded, TurnCommitted, TurnOpened
from app.domain.session import Session, rid_of
from app.store.content import StoredSession
from tests.tools.simulation.engine import EXPERTS, Generated
from tests.tools.simulation.spelling import Asked, Message, meaning
from workers import codec

Meanings = Sequence[object]

Claimed = tuple[str, float]
"""A claim, and when it was made: where a crash of the database undid one, another may have its id."""


class Told(msgspec.Struct):
    """A committed turn. `experts` are those of all its tokens but the last, from row `first_row` on; None if its engine
    was not asked for them."""

    event: TurnCommitted
    branch: int
    opened_seq: int
    seq: int
    agent: str | None
    messages: Sequence[Message]
    raws: Sequence[bytes]
    request: Meanings
    history: Meanings
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    versions: list[int]
    experts: list[int] | None
    bodies: list[bytes]

    @property
    def number(self) -> int:
        return self.event.turn

    @property
    def parent(self) -> int:
        """The turn whose messages it continues; 0 if it begins a conversation."""
        return self.event.parent if self.event.base_messages else 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def repeats(self, other: Told) -> bool:
        """Is it the request of a sibling, of the same agent, once more?"""
        return (self.parent, self.agent, self.request) == (other.parent, other.agent, other.request)


class Unexplained(Exception):
    """A committed turn that nobody asked for, or that no engine has sampled."""


class Story:
    """The turns of a session that are not undone, in the order of their commits. Raises Unexplained."""

    def __init__(
        self,
        stored: StoredSession,
        session: Session,
        log: Sequence[Recorded],
        matcher: Matcher,
        asked: Mapping[Claimed, Asked],
        generated: Mapping[str, Sequence[Generated]],
    ) -> None:
        self.session = session
        self.is_tree = session.is_tree
        self.turns: list[Told] = []
        self.by_number: dict[int, Told] = {}
        opened = {one.seq: (one.event, one.at) for one in log if isinstance(one.event, TurnOpened)}
        for turn in session.turns:
            event = log[turn.seq - 1].event
            assert isinstance(event, TurnCommitted)
            begun, begun_at = opened[event.fence]
            rid = rid_of(session.session_id, event.fence, begun.incarnation)
            request_of = asked.get((rid, begun_at))
            if request_of is None:
                raise Unexplained(f"nobody has asked for turn {turn.number}")
            token_frame, exchange = stored.frames[turn.number]
            assert exchange is not None
            tokens = codec.unpack_tokens(token_frame, exchange)
            logprobs = list(memoryview(tokens.logprobs).cast("d"))
            parts = _parts(generated.get(rid, ()), list(memoryview(tokens.output_ids).cast("i")), logprobs)
            if parts is None:
                raise Unexplained(f"no engine has sampled turn {turn.number} for its request")
            reply = msgspec.json.decode(codec.unpack_messages(exchange).message)
            request = [meaning(message, matcher) for message in request_of.messages]
            told = Told(
                event,
                turn.branch,
                turn.opened_seq,
                turn.seq,
                request_of.turn.agent_id,
                request_of.messages,
                request_of.raws,
                request,
                [*request, meaning(reply, matcher)],
                list(parts[0].prompt),
                [token for part in parts for token in part.output],
                logprobs,
                [part.version for part in parts for _ in part.output],
                self._experts(event.parent, parts),
                [part.body for part in parts],
            )
            self.turns.append(told)
            self.by_number[turn.number] = told

    def _experts(self, parent: int, parts: Sequence[Generated]) -> list[int] | None:
        """An engine leaves out the rows that it was told are known."""
        before = self.by_number[parent].experts if parent else []
        for part in parts:
            if part.experts is None or before is None:
                return None
            before = [*before[: part.first_row * EXPERTS], *part.experts]
        return before

    def before(self, seq: int) -> list[Told]:
        """The turns that were committed when event `seq` was written."""
        return [turn for turn in self.turns if turn.seq < seq]

    def line(self, number: int) -> list[int]:
        """The turns whose messages turn `number`'s history has, itself the first."""
        found: list[int] = []
        while number:
            found.append(number)
            number = self.by_number[number].parent
        return found

    def live(self, number: int) -> list[int]:
        """A linear session's live turns while turn `number` is the newest, that one first."""
        found: list[int] = []
        while number:
            found.append(number)
            number = self.by_number[number].event.parent
        return found

    def continued(self, turn: Told) -> int:
        """The turn whose tokens its prompt begins with, all of them; 0 if it is none's."""
        if not turn.parent:
            return 0
        tokens = self.by_number[turn.parent].tokens
        return turn.parent if turn.prompt[: len(tokens)] == tokens else 0

    def tokens_line(self, turn: Told) -> list[Told]:
        """The turns whose tokens the turn's are, itself the last."""
        found = [turn]
        while number := self.continued(found[0]):
            found.insert(0, self.by_number[number])
        return found

    def leaves(self, turns: Sequence[Told]) -> list[Told]:
        """Those of the turns whose tokens none of them continues, by branch."""
        continued = {self.continued(turn) for turn in turns}
        return sorted((turn for turn in turns if turn.number not in continued), key=lambda turn: turn.branch)

    def superseded(self, turns: Sequence[Told]) -> set[int]:
        """Those of the turns, which are the first that were committed, that no row is made of."""
        if not turns:
            return set()
        if not self.is_tree:
            return {turn.number for turn in turns} - set(self.live(turns[-1].number))
        parents = {turn.parent for turn in turns}
        return {
            turn.number
            for turn in turns
            for newer in turns
            if turn.number not in parents
            and newer.number in parents
            and newer.opened_seq > turn.seq
            and newer.repeats(turn)
        }


def _parts(generations: Sequence[Generated], output: list[int], logprobs: list[float]) -> list[Generated] | None:
    """The generations of one claim that have sampled this output, of which each goes on with the one before."""
    for parts in _chains(generations):
        said = [token for part in parts for token in part.output], [one for part in parts for one in part.logprobs]
        if said == (output, logprobs):
            return parts
    return None


def _chains(generations: Sequence[Generated]) -> Iterator[list[Generated]]:
    for place, first in enumerate(generations):
        chain, tokens = [first], [*first.prompt, *first.output]
        yield [first]
        for later in generations[place + 1 :]:
            if list(later.prompt) == tokens:
                chain.append(later)
                tokens += later.output
                yield list(chain)
