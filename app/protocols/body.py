"""Reads bodies as raw JSON, and translates their messages from where an earlier body had come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self, TypeVar

import msgspec

from app.domain import bounds, split
from app.domain.events import StreamMode
from app.domain.known_body import LONG_BODY, STATES, ContinuedBody, KnownBody, State, layout_of
from app.domain.request import TokenIds, number_of, value_of
from app.errors import InvalidRequest, Unsupported
from workers import scan
from workers.depth import MAX_DEPTH, too_deep
from workers.parse_prompt import MAX_TOKEN_ID, TokenId

MAX_ADAPTER = 512
"""Maximum length of a `lora_path`, which is stored with each turn."""

IDS = frozenset({"input_ids", "prompt"})

OURS = frozenset({"stream", "stream_options", "stream_mode", "n", "rid"})
"""Fields that Turnlog handles itself."""


_CONVERSATIONS = frozenset({"messages", "input"})

_NUMBER = tuple(b"%c" % one for one in b"-0123456789")
"""How a number begins."""

_PLAIN = 18
"""So many digits are a number that 64 bits hold."""

_TOKEN_IDS = msgspec.json.Decoder(list[TokenId])


def fields_of(
    body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
) -> tuple[dict[str, msgspec.Raw], bool]:
    """The body's fields, and whether it may have more values than `bounds.FEW`: then they are checked before they are
    decoded. If it is continued, its conversation is none of them. Raises InvalidRequest."""
    if continued is not None:
        return dict(continued.fields), False
    many_values = len(body) > bounds.FEW and not has_few_values and scan.may_exceed(body, bounds.FEW)
    if many_values:
        bounds.require_fields(body)
    try:
        if not body.isascii():
            body.decode()
        fields = split.fields(body, _require_within_bounds) if many_values else split.FIELDS.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 at byte {error.start}") from error
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels") from error
    if len(fields) > bounds.MAX_FIELDS:
        raise bounds.too_many_fields()
    return fields, many_values


def _require_within_bounds(name: str, raw: bytes) -> None:
    """Raises InvalidRequest for a long field that must not be decoded; lists of ids may be long."""
    if name in _CONVERSATIONS:
        bounds.require_messages(raw)
    elif name not in IDS:
        bounds.require_field(name, raw)


def items_of(
    body: bytes, name: str, raw: msgspec.Raw | None, many_values: bool, continued: ContinuedBody | None
) -> tuple[Sequence[msgspec.Raw], KnownBody | None]:
    """The items of a conversation's list, and the layout of a long body. Raises InvalidRequest."""
    if continued is not None:
        return continued.messages, continued.layout
    if raw is None:
        raise InvalidRequest(f"{name} is missing")
    if many_values:
        bounds.require_messages(bytes(raw))
    try:
        items = split.items(bytes(raw)) if many_values else split.ITEMS.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name} must be a list") from error
    if not items:
        raise InvalidRequest(f"{name} must not be empty")
    return items, layout_of(body, name, raw, items) if len(body) >= LONG_BODY else None


def engine_params(fields: dict[str, msgspec.Raw], many_values: bool) -> dict[str, msgspec.Raw]:
    """The fields that are passed to the engine. Raises InvalidRequest for a field that nests too deep, a number that no
    row can hold, or an invalid adapter."""
    params: dict[str, msgspec.Raw] = {}
    for name, raw in fields.items():
        if name in OURS:
            continue
        text = bytes(raw)
        if many_values:
            bounds.require_field(name, text)
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH and too_deep(text):
            raise InvalidRequest(f"{name} nests deeper than {MAX_DEPTH} levels")
        if text.startswith(_NUMBER) and (len(text) > _PLAIN or not text.isdigit()) and number_of(text) is None:
            raise InvalidRequest(f"{name} is a number that 64 bits cannot hold")
        params[name] = raw
    if "lora_path" in params:
        adapter = value_of(params["lora_path"], "lora_path")
        if isinstance(adapter, str) and (len(adapter) > MAX_ADAPTER or "\0" in adapter):
            raise InvalidRequest(f"lora_path must have at most {MAX_ADAPTER} characters, and no NUL")
    return params


def token_ids(raw: msgspec.Raw | None, name: str) -> TokenIds | None:
    """Token ids. Raises InvalidRequest for an empty list or anything else."""
    if raw is None or bytes(raw) == b"null":
        return None
    text = bytes(raw)
    if text[:1] != b"[" or text[-1:] != b"]" or b"-" in text:
        raise _no_ids(name)
    count = 0
    parts: list[bytes] = []
    for part in split.parts(text[1:-1]):
        try:
            found = len(_TOKEN_IDS.decode(b"[" + part + b"]"))
        except (msgspec.DecodeError, RecursionError) as error:
            raise _no_ids(name) from error
        if not found:
            raise _no_ids(name)
        count += found
        parts.append(part.translate(None, split.WHITE))
    return TokenIds(count, b",".join(parts))


def _no_ids(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be a list of token ids from 0 to {MAX_TOKEN_ID}, at least one")


def flag(raw: msgspec.Raw | None, name: str) -> bool:
    value = value_of(raw, name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(f"{name} must be true or false")


def stream_mode(fields: Mapping[str, msgspec.Raw]) -> StreamMode | None:
    """Raises InvalidRequest."""
    match value_of(fields.get("stream_mode"), "stream_mode"):
        case None | "whole" | "live" as mode:
            return mode
    raise InvalidRequest("stream_mode must be whole or live")


def require_one(raw: msgspec.Raw | None, name: str = "n") -> None:
    value = value_of(raw, name)
    if value is None or (value == 1 and isinstance(value, int) and not isinstance(value, bool)):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        raise Unsupported(f"{name} must be 1: a session has one continuation")
    raise InvalidRequest(f"{name} must be 1")


class Translator(Protocol):
    """Reads messages one by one. What it makes of the first ones must not depend on those that follow."""

    def read(self, index: int, raw: msgspec.Raw) -> None:
        """Read the body's message `index`. Raises InvalidRequest, and Unsupported."""

    def copy(self) -> Self:
        """One that goes on from here by itself."""


T = TypeVar("T", bound=Translator)


def translated(
    translator: T, raws: Sequence[msgspec.Raw], continued: ContinuedBody | None, *, keeps_states: bool
) -> tuple[T, Sequence[State]]:
    """The translator after all of these messages, and with `keeps_states` its states after the newest ones.

    It reads only what follows a state that is known of the messages' beginning. Raises as `Translator.read`.
    """
    translation = None if continued is None else continued.known.translation
    known = () if translation is None else translation.states
    begun = None if continued is None else continued.state(known)
    read = 0
    if begun is not None:
        translator, read = begun.reader.copy(), begun.messages
    states = [state for state in known if state.messages <= read]
    for index in range(read, len(raws)):
        translator.read(index, raws[index])
        if keeps_states and index + STATES >= len(raws):
            states.append(State(index + 1, translator.copy()))
    return translator, states[-STATES:]
