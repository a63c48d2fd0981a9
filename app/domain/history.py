"""Compares a request's history with the stored one: canonical messages, and where the request joins the session.

Harnesses change the engine's assistant message before they send it back: they drop reasoning, turn null into absent or
`""`, re-serialise tool arguments, reorder unknown fields. The `tolerant` matcher ignores that; the stored text stays
the engine's. Any other difference diverges, as does a request that shares nothing sampled with the history: treating it
as a retry would discard a sampled turn.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from app.domain import bounds, calls
from app.domain.events import Matcher
from app.domain.images import image_of
from app.domain.known_body import HistoryPrefix
from app.domain.reasoning import without_reasoning
from app.domain.returned import ReturnedCalls, StoredReplies
from app.domain.rules import EMPTY_HASH, RULES, Plan, TreeIndex, running_hash
from app.domain.session import Session, Turn
from app.domain.split import LONG, quoted_parts
from app.domain.surrogates import mended_text
from app.errors import InvalidRequest
from workers.parse_json import MAX_DEPTH, too_deep
from workers.parse_prompt import Hasher

Message = Mapping[str, Any]


def digest(data: bytes) -> str:
    """128 bits as hex."""
    return hashlib.sha256(data).hexdigest()[:32]


def canonical_hash(message: Message, matcher: Matcher) -> str:
    """128 bits over the canonical form of the message under `matcher`, as hex."""
    value = CANONICAL[matcher](message)
    if not any(isinstance(part, str) and len(part) > LONG for part in _members_of(value)):
        return digest(msgspec.json.encode(value, order="sorted"))
    hasher = hashlib.sha256()
    for piece in _encoded(value):
        hasher.update(piece)
    return hasher.hexdigest()[:32]


def _members_of(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _encoded(value: Any) -> Iterator[bytes]:
    """As msgspec encodes it with sorted keys, but a long text in pieces, so that other threads can run between them."""
    if isinstance(value, str):
        yield from quoted_parts(value)
    elif isinstance(value, Mapping):
        for index, key in enumerate(sorted(value)):
            yield (b"," if index else b"{") + msgspec.json.encode(key) + b":"
            yield from _encoded(value[key])
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _encoded(item)
        yield b"]" if value else b"[]"
    else:
        yield msgspec.json.encode(value)


def _tolerant(message: Message) -> list[Any]:
    """Role, text and calls: absent, null, "", [] and padding are equal, and so are equal arguments."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if isinstance(legacy := message.get("function_call"), Mapping):
        calls.append([None, *_function(legacy)])
    answers = message.get("tool_call_id") or message.get("id") if message["role"] == "tool" else None
    return [message["role"], _content(message.get("content")), calls, answers]


def _strict(message: Message) -> Any:
    """Every field, whatever its order and spacing."""
    return message


def _role_content_only(message: Message) -> list[Any]:
    return [message["role"], _content(message.get("content"))]


CANONICAL: Mapping[Matcher, Callable[[Message], Any]] = {
    "tolerant": _tolerant,
    "strict": _strict,
    "role_content_only": _role_content_only,
}


def _content(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list):
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content).strip()
        return [_part(part) for part in content]
    return _plain(content)


def _part(part: Any) -> Any:
    """Inline images are equal by their bytes and media type, however they are encoded."""
    image = image_of(part)
    return _plain(part) if image is None else ["image", image.media_type, image.sha256]


def _call(call: Any) -> list[Any]:
    if not isinstance(call, Mapping):
        return [None, None, _plain(call)]
    function = call.get("function")
    return [call.get("id"), *_function(function if isinstance(function, Mapping) else call)]


def _function(function: Message) -> list[Any]:
    return [function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        text = arguments.strip()
        if not text:
            return {}
        if len(text) > bounds.FEW and bounds.is_too_much(text.encode(errors="surrogatepass")):
            return text
        try:
            return _plain(msgspec.json.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            mended = mended_text(text)
            return text if mended is None else _arguments(mended)
    return {} if arguments is None else _plain(arguments)


_EXACT = 2**53
"""Below it, every integer is a double."""

_DOUBLES = 2**1023
"""Below it, every integer has a nearest double."""


def _plain(value: Any) -> Any:
    """JSON without what a re-serialisation changes: 1e3, 1000.0 and 1000 are one number.

    JavaScript has only doubles: what it returns for an integer from 2**53 on is the nearest one.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and _EXACT <= abs(value) < _DOUBLES:
        return float(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


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
        return _bare_hash(self.message(index), self.matcher)

    def _hash_of(self, message: Message) -> str:
        return canonical_hash(message, self.matcher)

    def _is_reply(self, message: Message, turn: Turn) -> bool:
        """Is the message the turn's reply, but for leading reasoning?"""
        own = self._hash_of(message)
        if own == turn.message_hashes[-1]:
            return True
        bare = _bare_hash(message, self.matcher) or own
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
        """Where the request joins the session. Raises as `Linear.join`."""
        return RULES[session.history].join(self, session, index, agent_id)

    def undone_turn(self, session: Session, index: TreeIndex) -> int | None:
        """The turn that is undone and whose whole history begins the request; None if that of one that is not is as
        long. `index` has both."""
        whole = self
        if self._trusts_ids or index.has_odd_calls or index.has_bare_replies or index.has_empty_replies:
            # How messages are read depends on the turns that are undone, too.
            whole = RequestHistory(self._sent, self.matcher, self._proven, trusts_ids=self._trusts_ids)
            whole.check(index)
        for history in whole.histories(index):
            numbers = list(index.ending_with(history))
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
                return message_hash, None, None
        reply = decode_message(message, "the reply's message")
        return canonical_hash(reply, self.matcher), _calls_hash(reply), _bare_hash(reply, self.matcher)

    def _sampled(self, index: TreeIndex, before: str, place: int) -> str:
        """The canonical hash of message `place`, or that of the one reply whose calls have the same ids.

        Of several replies, that to the history before it counts, whose running hash is `before`, or a proven one.
        """
        own, message = self.own_hash(place), self.message(place)
        if not message.get("tool_calls") or (calls := _calls_hash(message)) is None:
            return own
        alike = list(index.with_calls(calls))
        if any(turn.message_hashes[-1] == own for turn in alike):
            return own
        here = [turn for turn in alike if index.input_hash(turn.number) == before] or alike
        if len(here) > 1:
            here = [turn for turn in here if turn.number in self._proven]
        return here[0].message_hashes[-1] if len(here) == 1 else own

    def check(
        self,
        index: TreeIndex,
        session: Session | None = None,
        agent_id: str | None = None,
    ) -> None:
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
            self._put_back(*left_out)
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

    def _put_back(self, place: int, turn: Turn) -> None:
        """Put an empty message where the client left out the reply of `turn`."""
        self.left_out[place] = turn
        self._read_as([*self.raws[:place], LEFT_OUT, *self.raws[place:]])

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


def _calls_hash(message: Message) -> str | None:
    """A hash of an assistant's text, less leading reasoning, and its calls' ids and names; None without a call."""
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return None
    _, text, made, _ = _tolerant(without_reasoning(message))
    return digest(msgspec.json.encode([text, [call[:2] for call in made]]))


def _bare_hash(message: Message, matcher: Matcher) -> str | None:
    """The canonical hash of an assistant's message without its leading reasoning; None if it has none."""
    if matcher != "tolerant" or message["role"] != "assistant" or (bare := without_reasoning(message)) is message:
        return None
    return canonical_hash(bare, matcher)


LEFT_OUT = msgspec.Raw(b'{"role":"assistant"}')
"""Stands for an empty reply that the client left out."""


def is_beginning(part: Message, whole: Message) -> bool:
    """Is an assistant's message the beginning of another one: of its text, with the first of its tool calls?"""
    (_, text, calls, _), (_, whole_text, whole_calls, _) = _tolerant(part), _tolerant(whole)
    has_text = text == whole_text or (
        isinstance(text, str) and isinstance(whole_text, str) and whole_text.startswith(text)
    )
    return has_text and calls == whole_calls[: len(calls)]


def decode_message(raw: msgspec.Raw | bytes, where: str) -> Message:
    """A message object. Raises InvalidRequest if it is not an object with a role, or nests too deep."""
    if too_deep(bytes(memoryview(raw))):
        raise InvalidRequest(f"{where} nests deeper than {MAX_DEPTH} levels")
    try:
        message = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where} is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string")
    if not isinstance(message.get("tool_calls") or [], list):
        raise InvalidRequest(f"{where}.tool_calls must be a list")
    return message


_DECODE = msgspec.json.Decoder[Any]().decode
_ENCODE = msgspec.json.Encoder().encode


def plain_message(raw: msgspec.Raw | bytes) -> tuple[Message, str] | None:
    """A message of a role and a text, and its canonical hash (`tolerant`), in one step; None for any other one, which
    `decode_message` and `canonical_hash` read, or refuse."""
    text = bytes(raw)
    if len(text) > LONG or text.count(b"{") + text.count(b"[") > MAX_DEPTH:
        return None
    try:
        message = _DECODE(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if type(message) is not dict:
        return None
    role, content = message.get("role"), message.get("content")
    if (
        type(role) is not str
        or type(content) is not str
        or role == "tool"
        or message.get("tool_calls")
        or message.get("function_call")
    ):
        return None
    return message, hashlib.sha256(_ENCODE((role, content.strip(), (), None))).hexdigest()[:32]
