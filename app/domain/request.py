"""A request's body: the fields that Turnlog reads, and the rest as raw JSON for the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from app.domain import bounds, control, split
from app.domain.control import SessionControl
from app.domain.events import Protocol
from app.errors import InvalidRequest, Unsupported
from workers import scan
from workers.depth import MAX_DEPTH, too_deep
from workers.parse_prompt import MAX_TOKEN_ID, TokenId

MAX_ADAPTER = 512
"""Maximum length of a `lora_path`, which is stored with each turn."""

IDS = frozenset({"input_ids", "prompt"})

OURS = frozenset({"stream", "stream_options", "n", "rid"})
"""Fields that Turnlog handles itself; the engine is always asked for one whole reply."""


class TokenIds(msgspec.Struct, frozen=True):
    """A prompt's ids from a client: their number, and their decimal text separated by commas."""

    count: int
    text: bytes


class ChatRequest(msgspec.Struct, frozen=True):
    """`params` are all other top-level fields, raw and in the client's order; `messages[i]` is raw JSON.

    `ids` are the prompt's ids if the client sends `input_ids`. `control` is the session control, removed from `params`.
    """

    protocol: ClassVar[Protocol] = "chat"

    messages: list[msgspec.Raw]
    tools: msgspec.Raw | None
    params: dict[str, msgspec.Raw]
    stream: bool
    body_hash: str
    ids: TokenIds | None = None
    control: SessionControl | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    """As `ChatRequest`, with a prompt instead of messages: as `text` or as `ids`."""

    protocol: ClassVar[Protocol] = "completions"

    text: str | None
    ids: TokenIds | None
    params: dict[str, msgspec.Raw]
    stream: bool
    body_hash: str
    control: SessionControl | None = None


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


_CONTENT = msgspec.json.Decoder(_Message)
_TOKEN_IDS = msgspec.json.Decoder(list[TokenId])


def hash_body(body: bytes, route: bytes = b"") -> str:
    """The hash that identifies a retry: 128 bits over the body's bytes and its route, as hex.

    For chats the route is left out, so that stored hashes stay valid.
    """
    hasher = hashlib.sha256(body)
    hasher.update(route)
    return hasher.hexdigest()[:32]


def parse_chat(body: bytes, has_few_values: bool = False) -> ChatRequest:
    """`has_few_values`: the body has no more values than `bounds.FEW`.

    Raises InvalidRequest, which names the field, and Unsupported for `n` other than 1.

    Messages are only split here; `history.Incoming.check` checks the new ones.
    """
    has_many_values = not has_few_values and scan.may_exceed(body, bounds.FEW)
    fields = _split(body, has_many_values)
    messages = _messages(fields.pop("messages", None), has_many_values)
    tools = fields.pop("tools", None)
    ids = _ids(fields.pop("input_ids", None), "input_ids")
    stream = _flag(fields.pop("stream", None), "stream")
    _one_choice(fields.pop("n", None))
    params = _params({"tools": tools, **fields} if tools is not None else fields, has_many_values)
    params.pop("tools", None)
    if tools is not None and bytes(tools) == b"null":
        tools = None
    return ChatRequest(messages, tools, params, stream, hash_body(body), ids, control.remove_control(params))


def parse_completion(body: bytes, has_few_values: bool = False) -> CompletionRequest:
    """As `parse_chat`; also Unsupported for several prompts or choices."""
    has_many_values = not has_few_values and scan.may_exceed(body, bounds.FEW)
    fields = _split(body, has_many_values)
    text, ids = _prompt(fields.pop("prompt", None))
    stream = _flag(fields.pop("stream", None), "stream")
    _one_choice(fields.pop("n", None))
    if _flag(fields.pop("echo", None), "echo"):
        raise Unsupported("echo must be false: the reply would hold tokens that were not sampled")
    _one_choice(fields.pop("best_of", None), "best_of")
    params = _params(fields, has_many_values)
    return CompletionRequest(text, ids, params, stream, hash_body(body, b"completions"), control.remove_control(params))


def _params(fields: dict[str, msgspec.Raw], has_many_values: bool) -> dict[str, msgspec.Raw]:
    """The fields that are passed to the engine. Raises InvalidRequest for a field that nests too deep, or an invalid
    adapter."""
    params = {name: raw for name, raw in fields.items() if name not in OURS}
    for name, raw in params.items():
        if has_many_values:
            bounds.require_field(name, bytes(raw))
        if too_deep(bytes(raw)):
            raise InvalidRequest(f"{name} nests deeper than {MAX_DEPTH} levels")
    adapter = value_of(params.get("lora_path"), "lora_path")
    if isinstance(adapter, str) and (len(adapter) > MAX_ADAPTER or "\0" in adapter):
        raise InvalidRequest(f"lora_path must have at most {MAX_ADAPTER} characters, and no NUL")
    return params


def _prompt(raw: msgspec.Raw | None) -> tuple[str | None, TokenIds | None]:
    """A prompt as text or as ids; a list of one prompt is that prompt."""
    if raw is None:
        raise InvalidRequest("prompt is missing")
    if _is_list(raw) and bytes(raw).lstrip()[1:].lstrip()[:1] in (b'"', b"["):
        raw = _only_item(bytes(raw))
    if _is_list(raw):
        return None, _ids(raw, "prompt")
    value = value_of(raw, "prompt")
    if not isinstance(value, str):
        raise InvalidRequest("prompt must be text or a list of token ids")
    return value, None


def _is_list(raw: msgspec.Raw) -> bool:
    return bytes(raw).lstrip().startswith(b"[")


def _only_item(raw: bytes) -> msgspec.Raw:
    """Raises Unsupported for several prompts, or none."""
    if not scan.may_exceed(raw, bounds.FEW) or scan.extent(raw, 1).members == 1:
        try:
            items = split.items(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest("prompt is not a value that can be read") from error
        if len(items) == 1:
            return items[0]
    raise Unsupported("prompt must be one prompt: a session has one continuation")


def _ids(raw: msgspec.Raw | None, name: str) -> TokenIds | None:
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


def _split(body: bytes, has_many_values: bool) -> dict[str, msgspec.Raw]:
    """`has_many_values`: it may hold more values than `bounds.FEW`."""
    if has_many_values:
        bounds.require_fields(body)
    try:
        if not body.isascii():
            body.decode()
        fields = split.fields(body, _require_within_bounds) if has_many_values else split.FIELDS.decode(body)
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
    return fields


def _require_within_bounds(name: str, raw: bytes) -> None:
    """Raises InvalidRequest for a long field that must not be decoded; lists of ids may be long."""
    if name == "messages":
        bounds.require_messages(raw)
    elif name not in IDS:
        bounds.require_field(name, raw)


def _messages(raw: msgspec.Raw | None, has_many_values: bool) -> list[msgspec.Raw]:
    if raw is None:
        raise InvalidRequest("messages is missing")
    if has_many_values:
        bounds.require_messages(bytes(raw))
    try:
        messages = split.items(bytes(raw)) if has_many_values else split.ITEMS.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest("messages must be a list") from error
    if not messages:
        raise InvalidRequest("messages must not be empty")
    return messages


def has_more_than_text(messages: Sequence[msgspec.Raw]) -> bool:
    """Do these messages contain images or anything else that is not text?"""
    contents = (value_of(_CONTENT.decode(raw).content, "content") for raw in messages)
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") not in ("text", "refusal") for part in parts)


def value_of(raw: bytes | msgspec.Raw | None, name: str) -> Any:
    """Field `name` of a request, decoded. Raises InvalidRequest: raw JSON may hold a number that Python cannot
    represent."""
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not a value that can be read") from error


def _flag(raw: msgspec.Raw | None, name: str) -> bool:
    value = value_of(raw, name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(f"{name} must be true or false")


def _one_choice(raw: msgspec.Raw | None, name: str = "n") -> None:
    value = value_of(raw, name)
    if value is None or (value == 1 and isinstance(value, int) and not isinstance(value, bool)):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        raise Unsupported(f"{name} must be 1: a session has one continuation")
    raise InvalidRequest(f"{name} must be 1")


def join_object(fields: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in fields.items()) + b"}"
