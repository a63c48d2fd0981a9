"""Compares a request's history with the stored one, and decides where the request joins the session.

Messages are compared in their canonical form (`app.domain.canonical`). Any other difference diverges, as does a request
that shares nothing sampled with the history: treating it as a retry would discard a sampled turn.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Container, Iterator, Sequence

import msgspec

from app.domain import calls
from app.domain.calls import Message
from app.domain.canonical import bare_hash, calls_hash, canonical_hash, decode_message, plain_message
from app.domain.events import Matcher
from app.domain.known_body import HistoryPrefix
from app.domain.returned import ReturnedCalls, StoredReplies
from app.domain.rules import EMPTY_HASH, Plan, TreeIndex, diverging, running_hash
from app.domain.session import Session, Turn
from app.errors import HistoryMismatch, InvalidRequest, RollbackTooDeep
from workers.parse_prompt import Hasher

HASHED_AT_ONCE = 32
"""Messages that are joined before they are hashed: a session's many short ones cost a call each otherwise."""


class RequestHistory:
    """A request's messages as raw JSON, decoded and hashed only on demand.

    `raws[i]` is message i as the client wrote it. `proven` are the turns whose proofs the request holds. `trusts_ids`:
    where a client got arguments as objects and sends others, a reply is known by its calls' ids. Claude Code does so:
    it trims an edit's text. `prefix`: what is known of their bytes.

    `check` sets: `whole_hash`, the running hash of all messages; `client_hash`, the hash of their bytes;
    `partial_reply`, the last message if it is an assistant's: perhaps the beginning of a reply that was cut.
    """

    def __init__(
        self,
        raws: Sequence[msgspec.Raw],
        matcher: Matcher,
        proven: Container[int] = (),
        *,
        trusts_ids: bool = False,
        prefix: HistoryPrefix | None = None,
    ) -> None:
        self.raws = raws
        self._sent = raws
        self._trusts_ids = trusts_ids and matcher == "tolerant"
        self._proven = proven
        self.matcher: Matcher = matcher
        self._messages: dict[int, Message] = {}
        self._hashes: dict[int, str] = {}
        self._stored: dict[int, str] = {}
        self.left_out: dict[int, Turn] = {}
        self._index: TreeIndex | None = None
        self._session: Session | None = None
        self._hashed = 0
        self._hasher: Hasher = hashlib.sha256()
        self._prefix_hashes: dict[int, str] = {}
        self._repeated: Turn | None = None
        self._start = 0  # How many messages an earlier request, `_repeated`'s, had with the same bytes.
        self._running: dict[int, str] = {}
        self.whole_hash = EMPTY_HASH
        self.client_hash = ""
        self.partial_reply: Message | None = None
        self._prefix = prefix
        self._agent_id: str | None = None
        self._engine_raws: dict[int, bytes] = {}
        self._returned: ReturnedCalls | None = None
        self._checked = 0

    def __len__(self) -> int:
        return len(self.raws)

    def message(self, index: int) -> Message:
        """Message `index`. Raises InvalidRequest if it is not an object with a role."""
        message = self._messages.get(index)
        if message is None:
            message = self._messages[index] = decode_message(self.raws[index], f"messages[{index}]")
        return message

    def canonical(self, index: int) -> str:
        """The canonical hash of message `index`, or that of the stored reply that it is in another spelling."""
        if index < self._start:
            return self._known_hashes[index]
        return self._stored.get(index) or self._hashes.get(index) or self.own_hash(index)

    @functools.cached_property
    def _known_hashes(self) -> list[str]:
        """The canonical hashes of these messages, as they were told then."""
        assert self._index is not None
        assert self._repeated is not None
        return self._index.message_hashes(self._repeated)

    def own_hash(self, index: int) -> str:
        """The canonical hash of message `index` as the client spells it."""
        message_hash = self._hashes.get(index)
        if message_hash is None:
            try:
                message_hash = canonical_hash(self.message(index), self.matcher)
            except (TypeError, UnicodeEncodeError) as error:
                raise InvalidRequest(f"messages[{index}] has a field of an unexpected type") from error
            self._hashes[index] = message_hash
        return message_hash

    def new_hashes(self, start: int) -> tuple[str, ...]:
        """The canonical hashes of the messages from `start` on, which have been checked."""
        stored, own, places = self._stored, self._hashes, range(max(start, self._start), len(self.raws))
        hashes = [stored.get(place) or own[place] for place in places]
        known = self._known_hashes[start : self._start] if start < self._start else ()
        return (*known, *hashes)

    def role(self, index: int) -> str:
        role: str = self.message(index)["role"]
        return role

    def bare_hash(self, index: int) -> str | None:
        """The canonical hash of an assistant's message without its leading reasoning; None if it has none."""
        return bare_hash(self.message(index), self.matcher)

    def _hash_of(self, message: Message) -> str:
        return canonical_hash(message, self.matcher)

    def _is_reply(self, message: Message, turn: Turn) -> bool:
        """Is the message the turn's reply, but for leading reasoning?"""
        own = self._hash_of(message)
        if own == turn.message_hashes[-1]:
            return True
        bare = bare_hash(message, self.matcher) or own
        return self.matcher == "tolerant" and bare in (turn.message_hashes[-1], turn.bare_hash)

    def prefix_hash(self, count: int) -> str:
        """A hash of the first `count` messages' bytes. Ask for increasing counts: it is computed incrementally."""
        if count not in self._prefix_hashes:
            if count < self._hashed:
                self._hashed, self._hasher = 0, hashlib.sha256()
            for start in range(self._hashed, count, HASHED_AT_ONCE):
                self._hasher.update(b",".join(self.raws[start : min(start + HASHED_AT_ONCE, count)]))
                self._hasher.update(b",")
            self._hashed = count
            self._prefix_hashes[count] = self._hasher.copy().hexdigest()[:32]
        return self._prefix_hashes[count]

    def prefix_hasher(self) -> Hasher | None:
        """The hash state of all messages' bytes (`prefix_hash`); None if the client left one out."""
        if self.left_out:
            return None
        if self._hashed != len(self.raws):
            del self._prefix_hashes[len(self.raws)]
            self.prefix_hash(len(self.raws))
        return self._hasher.copy()

    def repeats(self, turn: Turn) -> bool:
        """Does the request begin with the messages of `turn`'s request, byte for byte?"""
        sent = turn.message_count - 1
        return len(self.raws) >= sent and self.prefix_hash(sent) == turn.client_hash

    def new(self, plan: Plan) -> list[bytes]:
        """The raw messages that are not in the stored history, with the engine's ids of calls."""
        raws = self.raws[plan.base_messages :]
        if self._returned is None:
            return [bytes(raw) for raw in raws]
        for place in range(plan.base_messages, self._checked):
            self._with_engine_ids(self._returned, place)
        return [self._engine_raws.get(place) or bytes(raw) for place, raw in enumerate(raws, plan.base_messages)]

    def continues(self, turn: Turn) -> bool:
        """Does the request begin with the messages of `turn`'s request, byte for byte, and then with its reply?"""
        place = turn.message_count - 1
        if turn is self._repeated and not self.left_out:
            return (self._stored.get(place) or self._hashes.get(place)) == turn.message_hashes[-1]
        return len(self.raws) > place and self.repeats(turn) and self.canonical(place) == turn.message_hashes[-1]

    def read_as_sent(self, index: TreeIndex) -> None:
        """Without the replies that were put back."""
        self.left_out = {}
        self._read_as(self._sent)
        self._compare(index)

    def join(self, session: Session, index: TreeIndex, agent_id: str | None) -> Plan:
        """Where the request joins the session. Raises RollbackTooDeep, HistoryMismatch in a linear session."""
        if session.is_tree:
            return _join_tree(self, session, index, agent_id)
        return _join_linear(self, session, index)

    def undone_turn(self, session: Session, index: TreeIndex) -> int | None:
        """The turn that is undone and whose whole history begins the request; None if that of one that is not is as
        long. `index` has both."""
        whole = self
        if self._trusts_ids or index.has_odd_calls or index.has_bare_replies or index.has_empty_replies:
            # How messages are read depends on the turns that are undone, too.
            whole = RequestHistory(self._sent, self.matcher, self._proven, trusts_ids=self._trusts_ids)
            whole.check(index)
        for history in whole.histories(index):
            numbers = list(index.by_history.all(history))
            if numbers:
                return None if any(number in session.turns for number in numbers) else numbers[0]
        return None

    def names(self, turn: Turn) -> bool:
        """Does the request prove to hold the turn, or leave out its reply?"""
        return turn.number in self._proven or turn in self.left_out.values()

    def histories(self, index: TreeIndex) -> Iterator[str]:
        """The running hashes of the request's beginnings, the longest first."""
        for count in range(len(self), self._start, -1):
            yield self._running[count]
        if self._repeated is not None:
            yield from reversed(index.prefixes(self._repeated)[1 : self._start + 1])

    @property
    def hash_before_last(self) -> str | None:
        """The running hash of all messages but the last; None if they are known by their bytes alone."""
        return self._running.get(len(self) - 1)

    def reply_hashes(self, message: bytes) -> tuple[str, str | None, str | None]:
        """The canonical hash of the reply's raw message, if it calls tools that without the calls' arguments, and if it
        has leading reasoning that without it.

        Raises InvalidRequest if it is invalid.
        """
        if self.matcher == "tolerant" and (plain := plain_message(message)) is not None:
            reply, message_hash = plain
            # Every tag that opens or closes reasoning begins with one of these.
            if "<" not in reply["content"] and "[" not in reply["content"]:
                return message_hash, calls_hash(reply), None
        reply = decode_message(message, "the reply's message")
        return canonical_hash(reply, self.matcher), calls_hash(reply), bare_hash(reply, self.matcher)

    def _sampled(self, index: TreeIndex, before: str, place: int) -> str:
        """The canonical hash of message `place`, or that of the one reply whose calls have the same ids.

        Of several replies, that to the history before it counts, whose running hash is `before`, or a proven one.
        """
        own, message = self.own_hash(place), self.message(place)
        if not message.get("tool_calls") or (calls := calls_hash(message)) is None:
            return own
        alike = list(index.with_calls(calls))
        if any(turn.message_hashes[-1] == own for turn in alike):
            return own
        here = [turn for turn in alike if index.inputs.get(turn.number) == before] or alike
        if len(here) > 1:
            here = [turn for turn in here if turn.number in self._proven]
        return here[0].message_hashes[-1] if len(here) == 1 else own

    def check(self, index: TreeIndex, session: Session | None = None, agent_id: str | None = None) -> None:
        """Compute the running hashes. Raises InvalidRequest for an invalid message.

        Messages that an earlier request had with the same bytes were checked then. A stored reply that the client
        returns in another spelling is told here, and one that it left out is put back.
        """
        self._index, self._session, self._agent_id = index, session, agent_id
        self._compare(index)
        while self.matcher == "tolerant" and index.has_empty_replies:
            left_out = self._replies.left_out(self, self._running, self._start)
            if left_out is None:
                break
            # An empty message stands where the client left out the reply.
            place, turn = left_out
            self.left_out[place] = turn
            self._read_as([*self.raws[:place], LEFT_OUT, *self.raws[place:]])
            self._compare(index)

    def _compare(self, index: TreeIndex) -> None:
        prefix, counts, count = None if self.left_out else self._prefix, index.counts, len(self.raws)
        repeated: Turn | None = None
        if prefix is not None:
            repeated = self._known_turn(index, prefix)
        elif counts:
            # Most requests continue the longest one so far; else the others are looked through.
            if counts[-1] <= count:
                repeated = index.by_prefix_hash.get(self.prefix_hash(counts[-1]))
            repeated = repeated or index.repeated(count, self.prefix_hash)
        if repeated is not None and repeated.agent_id != self._agent_id:
            # Another agent may mean other replies by the same bytes.
            repeated = None if index.has_bare_replies or index.has_odd_calls else repeated
        self._repeated = repeated
        start = self._start = 0 if repeated is None else repeated.message_count - 1
        at = EMPTY_HASH if repeated is None else index.inputs.get(repeated.number, EMPTY_HASH)
        running = self._running = {start: at}
        self._stored, is_tolerant = {}, self.matcher == "tolerant"
        self._checked, self._returned = start, self._returned_calls() if index.has_odd_calls else None
        for place in range(start, count):
            if is_tolerant and place not in self._messages and (plain := plain_message(self.raws[place])) is not None:
                self._messages[place], self._hashes[place] = plain
            turn = self.left_out.get(place)
            if turn is None and self._returned is not None:
                turn = self._recognised(self._returned, at, place)
            stored = own = self._hashes.get(place) or self.own_hash(place)
            after = hashlib.sha256(f"{at}:{own}".encode()).hexdigest()[:32]
            if turn is not None:
                stored = turn.message_hashes[-1]
            elif is_tolerant and self._messages[place]["role"] == "assistant" and after not in index.by_history:
                stored = self._sampled(index, at, place) if self._trusts_ids else own
                stored = self._replies.matched_reply(self, at, place) if stored == own else stored
            if stored != own:
                self._stored[place] = stored
                after = running_hash(at, stored)
            at = running[place + 1] = after
        self.whole_hash, self.client_hash = at, self.prefix_hash(count)
        last = self._messages.get(count - 1) or (self.message(count - 1) if count else {"role": ""})
        self.partial_reply = last if last["role"] == "assistant" else None

    @functools.cached_property
    def _replies(self) -> StoredReplies:
        assert self._index is not None
        return StoredReplies(self._index, self._session, self._agent_id, self._proven)

    def _read_as(self, raws: Sequence[msgspec.Raw]) -> None:
        self.raws = raws
        self._messages, self._hashes, self._prefix_hashes, self._engine_raws = {}, {}, {}, {}
        self._hashed, self._hasher = 0, hashlib.sha256()
        self.__dict__.pop("_known_hashes", None)

    def _returned_calls(self) -> ReturnedCalls:
        assert self._index is not None
        return ReturnedCalls(
            self._index,
            self._hash_of,
            self._is_reply,
            self._proven,
            self._agent_id,
            ignores_arguments=self.matcher == "tolerant",
        )

    def _recognised(self, returned: ReturnedCalls, before: str, place: int) -> Turn | None:
        """The turn whose reply message `place` is, if its calls are known by their ids alone. Calls and results get the
        engine's ids."""
        message = self.message(place)
        turn = None
        if calls.ids_of(message):
            turn = returned.sampled_by(message, before, self.own_hash(place), self._results(place + 1))
        if self._with_engine_ids(returned, place):
            self._hashes.pop(place, None)
        return turn

    def _with_engine_ids(self, returned: ReturnedCalls, place: int) -> bool:
        """Does message `place` get other ids so?"""
        ids = calls.ids_of(self.message(place))
        own = {at: own_id for at, call_id in enumerate(ids) if (own_id := returned.own_id(call_id)) != call_id}
        if not own:
            return False
        raw = self._engine_raws[place] = calls.with_ids(self.raws[place], own)
        self._messages[place] = decode_message(raw, f"messages[{place}]")
        return True

    def _results(self, start: int) -> list[Message]:
        """The tools' messages from `start` on, up to any other."""
        results = []
        for place in range(start, len(self.raws)):
            if self.message(place)["role"] != "tool":
                break
            results.append(self.message(place))
        return results

    def _known_turn(self, index: TreeIndex, prefix: HistoryPrefix) -> Turn | None:
        """The newest turn of a known body's history whose request begins the messages, canonically."""
        turn = index.turn(prefix.turn)
        if turn is not None and prefix.prefix_hasher is not None:
            self._hashed, self._hasher = prefix.messages, prefix.prefix_hasher.copy()
            self._prefix_hashes[prefix.messages] = turn.client_hash
        return index.turn_within(prefix.turn, prefix.messages)


LEFT_OUT = msgspec.Raw(b'{"role":"assistant"}')
"""Stands for an empty reply that the client left out."""


def _join_tree(request: RequestHistory, session: Session, index: TreeIndex, agent_id: str | None) -> Plan:
    """A request attaches to the deepest turn whose whole history begins it. Of several, one that the request proves to
    hold is preferred, then one of the same agent, then one whose request the client spelled as this one, then the
    newest."""

    def preference(turn: Turn) -> tuple[bool, bool, bool, int]:
        return request.names(turn), turn.agent_id == agent_id, request.repeats(turn), turn.seq

    for history in request.histories(index):
        ending = [session.turn(number) for number in index.by_history.all(history) if number in session.turns]
        if ending:
            parent = ending[0] if len(ending) == 1 else max(ending, key=preference)
            return Plan(parent.number, parent.message_count)
    return Plan(0, 0)


def _join_linear(request: RequestHistory, session: Session, index: TreeIndex) -> Plan:
    """A request continues the end of the one live path; or it goes back on it, which supersedes the turns behind. It
    supersedes turns only if it repeats the input of one of them, or follows a reply that this session sampled.

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


def _compared(session: Session, leaf: Turn, request: RequestHistory) -> Plan:
    """Where a request joins that does not simply continue the newest turn. Raises as `_join_linear`."""
    if leaf.shape == "completions":
        return diverging(session, HistoryMismatch.of("the session's last turn is a completion, not a chat"))
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


def _equal_messages(history: Sequence[Turn], request: RequestHistory, window: int) -> int:
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
    session: Session, request: RequestHistory, equal: int, superseded: Sequence[Turn], *, follows_sampled: bool
) -> HistoryMismatch | RollbackTooDeep | None:
    """Why the request may not supersede these turns, the newest of the history; None if it may.

    Its first `equal` messages are stored ones; `follows_sampled`: one of them is a reply of the session.
    """
    roles = [request.message(index)["role"] for index in range(equal, len(request))]
    if "assistant" in roles:
        return HistoryMismatch.of(
            f"messages[{equal}] differs from the stored message at that place (matcher "
            f"{session.config.matcher}), and an assistant message after it was not produced by this session; "
            f"{equal} of {len(request)} messages match"
        )
    repeats_input = equal == len(request) == superseded[0].message_count - 1
    if not (follows_sampled or repeats_input):
        return HistoryMismatch.of(
            f"the request starts another conversation: {equal} of {len(request)} messages match (matcher "
            f"{session.config.matcher}), none of them sampled in this session, and it repeats no turn's input"
        )
    window = session.config.rollback_window
    if len(superseded) > window:
        why = f"the request goes back {len(superseded)} turns, to message {equal}"
        return RollbackTooDeep.of(why, window)
    return None
