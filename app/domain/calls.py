"""Tool calls as engines sample them and as clients and engines can take them: their ids and their arguments.

An engine may give a call no id, a number, or one that it has given before, and arguments that are no JSON object. The
log keeps what was sampled. A client is given other ids where it could not use the engine's, and an engine is sent an
object where it would refuse the arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from app.domain import bounds
from app.domain.events import GivenIds
from app.domain.left_out import SURROGATE, left_out_at
from app.domain.request import as_raw, join_object
from app.domain.surrogates import mended_text
from turnlog.actions import has_failed
from workers.reply import SampledCall

Message = Mapping[str, Any]

NAME = b'"tool_calls"'
"""In every raw message that calls tools. In a text its quotes are escaped."""

_PREFIXES = {"chat": "call_", "messages": "toolu_", "responses": "call_"}
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_OTHER = re.compile(r"[^A-Za-z0-9_-]")

MOST_SOUGHT = 32
"""A reply with more calls gets ids of ours for all of them: each of the engine's is looked for in the whole history."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CALLS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_MESSAGE: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)


class _Calling(msgspec.Struct):
    tool_calls: list[msgspec.Raw] | None = None


_CALLING = msgspec.json.Decoder(list[_Calling])


def failed_results(messages: Sequence[bytes]) -> int:
    """How many of these raw messages are results that say that their calls failed."""
    failed = 0
    for raw in messages:
        try:
            failed += has_failed(_MESSAGE.decode(raw))
        except _UNREADABLE:
            continue  # the engine will say so
    return failed


def is_object(arguments: Any) -> bool:
    """Are a call's arguments a JSON object, as one or as its text?"""
    if not isinstance(arguments, str):
        return isinstance(arguments, dict)
    try:
        return isinstance(_MESSAGE.decode(arguments), dict)
    except _UNREADABLE:
        return False


def sampled_calls(message: bytes) -> tuple[SampledCall, ...]:
    """The calls of a reply's raw message."""
    if NAME not in message:
        return ()
    calls = _MESSAGE.decode(message).get("tool_calls")
    return tuple(map(_sampled, calls)) if isinstance(calls, list) else ()


def _sampled(call: Any) -> SampledCall:
    arguments = _function(call).get("arguments")
    call_id = call.get("id") if isinstance(call, Mapping) else None
    return SampledCall(call_id) if is_object(arguments) else SampledCall(call_id, arguments)


def _function(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


# ids


def alias(call_id: str) -> str:
    """The id as clients spell it that know no other characters (litellm)."""
    return _OTHER.sub("_", call_id)


def count(messages: Sequence[bytes | memoryview]) -> int:
    """The calls in raw messages, each of which may be several, with commas between them."""
    texts = [bytes(raw) for raw in messages]
    calling = [message for text in texts if NAME in text for message in _CALLING.decode(b"[" + text + b"]")]
    return sum(len(message.tool_calls or ()) for message in calling)


def has_odd_ids(calls: Sequence[SampledCall]) -> bool:
    """May a client return another id than the engine's for one of them?"""
    return any(not isinstance(call.id, str) or _PLAIN.fullmatch(call.id) is None for call in calls)


def given_ids(
    calls: Sequence[SampledCall], protocol: str, proof: Callable[[], str], known: Sequence[str | msgspec.Raw]
) -> GivenIds | None:
    """What the client is given in place of ids that it could not use; None if it can use all of them.

    `proof` makes the turn's name, `known` are the ids of its request's calls, or the messages that hold them: in
    Messages and Responses none of these is used again.
    """
    seen: set[str] = set()
    places: list[int] = []
    for place, call in enumerate(calls):
        if (
            not isinstance(call.id, str)
            or not call.id
            or call.id in seen
            or (
                protocol != "chat"
                and (_PLAIN.fullmatch(call.id) is None or len(calls) > MOST_SOUGHT or _occurs(call.id, known))
            )
        ):
            places.append(place)
        else:
            seen.add(call.id)
    return GivenIds(given_prefix(protocol, proof()), tuple(places)) if places else None


def _occurs(call_id: str, known: Sequence[str | msgspec.Raw]) -> bool:
    quoted = b'"%b"' % call_id.encode()
    return call_id in known or any(quoted in bytes(one) for one in known if not isinstance(one, str))


def given_prefix(protocol: str, proof: str) -> str:
    return _PREFIXES[protocol] + proof


def with_given_ids(message: Message, given: GivenIds | None) -> Message:
    """A reply's message as its client gets it."""
    if given is None:
        return message
    calls = list(message["tool_calls"])
    for place, call_id in given.by_place().items():
        calls[place] = {**calls[place], "id": call_id} if isinstance(calls[place], Mapping) else calls[place]
    return {**message, "tool_calls": calls}


def with_ids(raw: bytes | msgspec.Raw, ids: Mapping[int, Any]) -> bytes:
    """The raw message with these ids for its calls by place, or as place 0 for what it answers (`None`: none)."""
    message = {name: bytes(value) for name, value in _FIELDS.decode(raw).items()}
    if _MESSAGE.decode(message.get("role", b"null")) == "tool":
        key = answer_key(message)
        del message[key]
        return join_object(message if ids[0] is None else {**message, key: msgspec.json.encode(ids[0])})
    calls = _CALLS.decode(message["tool_calls"])
    for place, call_id in ids.items():
        calls[place] = {**calls[place], "id": as_raw(call_id)}
    return join_object({**message, "tool_calls": b"[" + b",".join(map(join_object, calls)) + b"]"})


def answer_key(message: Mapping[str, Any]) -> str:
    """The field that says what a tool's message answers; qwen-agent has another one."""
    return "tool_call_id" if "tool_call_id" in message else "id"


class ReplyCalls:
    """The calls of a committed reply, in each spelling that a client may return them in."""

    def __init__(self, calls: Sequence[SampledCall], given: GivenIds | None) -> None:
        self.calls = calls
        self._given = {} if given is None else given.by_place()

    def pairs(self, ids: Sequence[Any]) -> list[int] | None:
        """For each call the place of the one among `ids` that is the same; None if these are others' ids."""
        if len(ids) != len(self.calls):
            return None
        if all(self._is(place, call_id) for place, call_id in enumerate(ids)):
            return list(range(len(ids)))
        if len(ids) > MOST_SOUGHT:
            return None
        left = dict(enumerate(ids))
        places = []
        for place in range(len(ids)):
            same = next((at for at, call_id in left.items() if self._is(place, call_id)), None)
            if same is None:
                return None
            del left[same]
            places.append(same)
        return places

    def _is(self, place: int, call_id: Any) -> bool:
        own = self.calls[place].id
        return (
            call_id == own
            or (call_id is not None and call_id == self._given.get(place))
            or (isinstance(own, str) and own != "" and alias(own) == call_id)
        )

    def mended(self, message: Message, *, with_arguments: bool) -> Message | None:
        """A client's message with the engine's ids, in the engine's order, and with `with_arguments` those arguments of
        the engine that are no object; None if it does not have these calls."""
        returned = message["tool_calls"]
        places = self.pairs([call.get("id") for call in returned])
        if places is None:
            return None
        calls = []
        for call, place in zip(self.calls, places, strict=True):
            own = {**returned[place], "id": call.id}
            if with_arguments and not call.has_object and isinstance(own.get("function"), Mapping):
                own["function"] = {**own["function"], "arguments": call.arguments}
            calls.append(own)
        return {**message, "tool_calls": calls}


class OddCalls:
    """The calls of a session's replies that clients may return otherwise than they were sampled.

    `unread` are turns whose calls are not known yet: events do not hold them.
    """

    def __init__(self) -> None:
        self.unread: list[int] = []
        self._given: dict[str, tuple[int, GivenIds]] = {}
        self._of_turn: dict[int, GivenIds | None] = {}
        self._replies: dict[int, ReplyCalls] = {}
        self._engine_ids: dict[str, set[str]] = {}
        self._turns: dict[str, list[int]] = {}

    def __contains__(self, turn: int) -> bool:
        return turn in self._of_turn

    def add(self, turn: int, given: GivenIds | None) -> None:
        self.unread.append(turn)
        self._of_turn[turn] = given
        if given is not None:
            self._given[given.prefix] = turn, given

    def learn(self, turn: int, calls: Sequence[SampledCall]) -> None:
        if turn in self._replies:
            return
        self.unread.remove(turn)
        self._replies[turn] = ReplyCalls(calls, self._of_turn[turn])
        for call in calls:
            if isinstance(call.id, str) and call.id:
                self._engine_ids.setdefault(alias(call.id), set()).add(call.id)
                self._turns.setdefault(alias(call.id), []).append(turn)

    def reply_calls(self, turn: int) -> ReplyCalls | None:
        """A turn's calls, if they are odd."""
        return self._replies.get(turn)

    def own_id(self, call_id: Any) -> Any:
        """The engine's id, where it is the only one in the session that a client spells so."""
        if not isinstance(call_id, str):
            return call_id
        prefix, _, place = call_id.rpartition("_")
        if place.isdecimal() and prefix in self._given:
            turn, given = self._given[prefix]
            if int(place) in given.places and turn in self._replies:
                return self._replies[turn].calls[int(place)].id
        spelled = self._engine_ids.get(call_id, ())
        return next(iter(spelled)) if len(spelled) == 1 else call_id

    def carried(self, ids: Sequence[Any]) -> list[int]:
        """The turns that may have sampled calls with these ids; none if they are too many to tell."""
        turns: list[int] = []
        for call_id in ids[:1]:
            prefix = call_id.rpartition("_")[0] if isinstance(call_id, str) else ""
            if prefix in self._given:
                turns.append(self._given[prefix][0])
            turns += self._turns.get(call_id, ()) if isinstance(call_id, str) else ()
        return turns if len(turns) <= MOST_SOUGHT else []


def ids_of(message: Message) -> list[Any]:
    """The ids of an assistant's calls, or of the call that a tool's message answers. A message without is []; one with
    calls that are no objects, too."""
    if message["role"] == "tool":
        answered = message.get(answer_key(message))
        return [answered] if isinstance(answered, str) else []
    calls = message.get("tool_calls") or ()
    is_caller = message["role"] == "assistant" and all(isinstance(call, Mapping) for call in calls)
    return [call.get("id") for call in calls] if is_caller else []


# arguments


def sendable(raw: bytes) -> bytes:
    """A raw message as every engine takes it: SGLang refuses a call whose arguments are no object."""
    if NAME not in raw:
        return raw
    try:
        message = _FIELDS.decode(raw)
        calls = _CALLS.decode(message["tool_calls"])
        functions = [_FIELDS.decode(call["function"]) for call in calls]
        arguments = [_MESSAGE.decode(function.get("arguments", b"null")) for function in functions]
    except (*_UNREADABLE, KeyError):
        return raw
    if all(map(is_object, arguments)):
        return raw
    mended = []
    for call, function, value in zip(calls, functions, arguments, strict=True):
        if not is_object(value):
            text = msgspec.json.encode(lenient_object(value))
            call = {**call, "function": msgspec.Raw(join_object({**function, "arguments": text}))}
        mended.append(join_object(call))
    return join_object({**message, "tool_calls": b"[" + b",".join(mended) + b"]"})


def halves_in(messages: Sequence[bytes], base: int) -> list[str]:
    """Those of the chat messages from `base` on that have half of a surrogate pair in the JSON of a call's arguments
    (`app.domain.left_out`)."""
    return [
        left_out_at(SURROGATE, f"messages[{index}]")
        for index, raw in enumerate(messages, base)
        if any(isinstance(call.arguments, str) and mended_text(call.arguments) for call in sampled_calls(raw))
    ]


def lenient_object(arguments: Any) -> str:
    """The object that such arguments may be read as, as text: raw control characters, NaN and halves of surrogate pairs
    are taken, and of anything else comes `{}`."""
    if not isinstance(arguments, str) or bounds.is_too_much(arguments.encode(errors="surrogatepass")):
        return "{}"
    try:
        value = json.loads(mended_text(arguments) or arguments, strict=False)
        return msgspec.json.encode(value).decode() if isinstance(value, dict) else "{}"
    except (ValueError, OverflowError, RecursionError):
        return "{}"
