"""Parses a Responses request: its parameters, and the stored turns that it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from app.domain import control, prefill
from app.domain.known_body import ContinuedBody, KnownBody, State, Translation
from app.domain.left_out import INCLUDE, left_out_at
from app.domain.proofs import find_proof
from app.domain.request import (
    ChatRequest,
    as_raw,
    engine_params,
    fields_of,
    flag,
    items_of,
    require_one,
    require_top,
    stream_mode,
    token_ids,
    translated,
    value_of,
)
from app.errors import InvalidRequest, PreviousResponseNotFound
from app.protocols.base import StoredTurn
from app.protocols.responses.items import (
    BETWEEN_SYSTEM,
    MESSAGE,
    REASONING,
    REFERENCE,
    RESPONSE,
    TRIGGER_ITEM,
    Conversation,
    fields,
    flag_or_none,
    items,
    name,
    one_of,
    output_item,
    response_proof,
    text,
    text_or_none,
    unsupported,
)
from app.protocols.responses.reply import Echo, read_echo
from app.protocols.responses.tools import collect, read_choice, read_tools

Params = dict[str, msgspec.Raw]

NOT_CARRIED = frozenset(
    ["client_metadata", "prompt_cache_retention", "prompt_cache_options", "service_tier", "stream_options"]
)
"""Hints to OpenAI's service, which mean nothing to an engine: accepted, and neither sent nor kept."""

_REFUSED = (
    "background_options",
    "context_management",
    "conversation",
    "image",
    "max_tool_calls",
    "moderation",
    "prompt",
    "access_programs",
)

_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"

_OF_SERVER_TOOLS = ("web_search_call.", "file_search_call.", "code_interpreter_call.", "computer_call_output.")
"""What an `include` asks for of the calls of a server's tools begins so; there are no such calls."""

_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Engines know three."""

_NO_THINKING = {"enable_thinking": False, "thinking": False}
"""Chat templates' own switches: Qwen's and GLM's; DeepSeek's and Granite's."""

_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
"""Of `metadata`, as OpenAI has them."""


class Parameters:
    """Takes the fields of a request that Turnlog knows, each once. `params` go to the engine, `shown` into the reply.

    Fields that it does not take are left in `given`.
    """

    def __init__(self, given: Params) -> None:
        self.given = given
        self.params: Params = {}
        self.shown: dict[str, Any] = {}
        self.encrypted = self.logprobs = False
        self.left_out: list[str] = []

    def take(self, field: str) -> Any:
        """The field's value, decoded; None if it is absent."""
        raw = self.given.pop(field, None)
        return None if raw is None else value_of(raw, field)

    def send(self, field: str, value: Any) -> None:
        self.params[field] = as_raw(value)

    def read(self) -> None:
        """Raises InvalidRequest, and Unsupported for what cannot be carried to an engine."""
        for field in _REFUSED:
            if field in self.given and self.take(field) not in (None, []):
                raise unsupported(field)
        for field in NOT_CARRIED:
            self.given.pop(field, None)
        for reader in (self._sampling, self._reasoning, self._text, self._include, self._service, self._repeated):
            reader()

    def _sampling(self) -> None:
        for field, sent, check in (
            ("temperature", "temperature", _number),
            ("top_p", "top_p", _number),
            ("max_output_tokens", "max_tokens", _count),
            ("parallel_tool_calls", "parallel_tool_calls", flag_or_none),
        ):
            raw = self.given.get(field)
            value = self.shown[field] = None if raw is None else check(self.take(field), field)
            if value is not None and raw is not None:
                self.params[sent] = raw
        self.shown["parallel_tool_calls"] = self.shown["parallel_tool_calls"] is not False

    def _reasoning(self) -> None:
        value = self.take("reasoning")
        given = {} if value is None else fields(value, "reasoning")
        effort = text_or_none(given.get("effort"), "reasoning.effort")
        if effort == "none":
            own = self.take("chat_template_kwargs")
            self.send("chat_template_kwargs", {**_NO_THINKING, **fields(own or {}, "chat_template_kwargs")})
        elif effort is not None:
            self.send("reasoning_effort", _EFFORTS[one_of(effort, "reasoning.effort", ("none", *_EFFORTS))])
            self.given.pop("reasoning_effort", None)
        summary = self._asked(given, "summary") or self._asked(given, "generate_summary")
        for key, kept in given.items():
            is_default = kept is None or (key, kept) in (
                ("context", "auto"),
                ("context", "all_turns"),
                ("mode", "standard"),
            )
            if key not in ("effort", "summary", "generate_summary") and not is_default:
                raise unsupported(f"reasoning.{key[:64]}")
        self.shown["reasoning"] = {"effort": effort, "summary": summary}

    def _asked(self, given: dict[str, Any], key: str) -> str | None:
        value = given.get(key)
        return None if value is None else one_of(value, f"reasoning.{key}", ("auto", "concise", "detailed"))

    def _text(self) -> None:
        value = self.take("text")
        given = {} if value is None else fields(value, "text")
        form = given.get("format") or {"type": "text"}
        kind = text(fields(form, "text.format").get("type"), "text.format.type")
        if one_of(kind, "text.format.type", ("text", "json_object", "json_schema")) != "text":
            self.given.pop("response_format", None)
            self.send("response_format", _schema(form) if kind == "json_schema" else {"type": kind})
        self.shown["text"] = {"format": form}
        verbosity = given.get("verbosity")
        if verbosity is not None:
            self.given.pop("verbosity", None)
            self.send("verbosity", one_of(verbosity, "text.verbosity", ("low", "medium", "high")))
            self.shown["text"]["verbosity"] = verbosity

    def _include(self) -> None:
        value = self.take("include")
        for index, included in enumerate([] if value is None else items(value, "include")):
            place = f"include[{index}]"
            if text(included, place).startswith(_OF_SERVER_TOOLS):
                self.left_out.append(left_out_at(INCLUDE, place))
            elif included == _ENCRYPTED:
                self.encrypted = True
            elif included == _LOGPROBS:
                self.logprobs = True
            else:
                raise unsupported(place, included)
        if "top_logprobs" in self.given:
            require_top(self.given["top_logprobs"], "top_logprobs")
            if top := self.take("top_logprobs"):
                self.send("top_logprobs", top)
                self.shown["top_logprobs"] = top

    def _service(self) -> None:
        if flag_or_none(self.take("background"), "background"):
            raise unsupported("background")
        truncation = self.take("truncation")
        if truncation == "auto":
            raise unsupported("truncation", "auto")
        if truncation is not None:
            one_of(truncation, "truncation", ("auto", "disabled"))
        store = flag_or_none(self.take("store"), "store")
        self.shown |= {"background": False, "truncation": "disabled", "store": store is not False}

    def _repeated(self) -> None:
        """Fields that mean nothing to an engine and that the response repeats."""
        for field in ("user", "safety_identifier", "prompt_cache_key"):
            if field in self.given and (value := text_or_none(self.take(field), field)) is not None:
                self.shown[field] = value
        metadata = self.take("metadata")
        self.shown["metadata"] = {} if metadata is None else _metadata(fields(metadata, "metadata"))


def _metadata(metadata: dict[str, Any]) -> dict[str, str]:
    if len(metadata) > _MAX_PAIRS:
        raise InvalidRequest(f"metadata has more than {_MAX_PAIRS} entries")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY or len(text(value, f"metadata.{key[:_MAX_KEY]}")) > _MAX_VALUE:
            raise InvalidRequest(f"metadata: a key has at most {_MAX_KEY} characters, a value at most {_MAX_VALUE}")
    return metadata


def _schema(form: dict[str, Any]) -> dict[str, Any]:
    path = "text.format"
    schema: dict[str, Any] = {"name": name(form.get("name"), f"{path}.name")}
    schema["schema"] = fields(form.get("schema"), f"{path}.schema")
    checks: tuple[tuple[str, Callable[[Any, str], Any]], ...] = (
        ("strict", flag_or_none),
        ("description", text_or_none),
    )
    for key, check in checks:
        if (value := check(form.get(key), f"{path}.{key}")) is not None:
            schema[key] = value
    return {"type": "json_schema", "json_schema": schema}


def _number(value: Any, path: str) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise InvalidRequest(f"{path} must be a number")


def _count(value: Any, path: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise InvalidRequest(f"{path} must be a positive integer")


_MARK = msgspec.json.encode(REFERENCE)


def complete_request(request: ChatRequest, turns: Mapping[str, StoredTurn]) -> ChatRequest:
    """`turns` are those that it continues and needs, by proof. Raises PreviousResponseNotFound, and InvalidRequest for
    an item that the session does not have."""
    if request.continues is None and not request.needs:
        return request
    messages = [_filled(raw, turns) if _MARK in bytes(raw) else raw for raw in request.messages]
    if request.continues is not None:
        turn = turns.get(request.continues)
        if turn is None:
            raise PreviousResponseNotFound("previous_response_id names no response of this session")
        messages = [*_history(turn, read_echo(request.echo).instructions), *messages]
    return msgspec.structs.replace(request, messages=messages)


def _history(turn: StoredTurn, instructions: str) -> list[msgspec.Raw]:
    """A stored turn's messages with these instructions instead of its own."""
    before = read_echo(turn.echo).instructions
    if before == instructions:
        return turn.messages
    first: Any = msgspec.json.decode(turn.messages[0])
    has_system = first.get("role") == "system" and isinstance(first.get("content"), str)
    rest: str = first["content"] if has_system else ""
    if before and rest.startswith(before):
        rest = rest[len(before) :].removeprefix(BETWEEN_SYSTEM)
    texts = [one for one in (instructions, rest) if one]
    system = [as_raw({"role": "system", "content": BETWEEN_SYSTEM.join(texts)})]
    return [*(system if texts else []), *turn.messages[1 if has_system else 0 :]]


def _filled(raw: msgspec.Raw, turns: Mapping[str, StoredTurn]) -> msgspec.Raw:
    """A message whose places are filled with what they refer to."""
    message = msgspec.json.decode(raw)
    for key in ("content", "reasoning_content"):
        if _is_place(message.get(key)):
            message[key] = _referred(message[key][REFERENCE], turns)
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [_referred(call[REFERENCE], turns) if _is_place(call) else call for call in calls]
    return as_raw(message)


def _is_place(value: Any) -> bool:
    return isinstance(value, dict) and REFERENCE in value


def _referred(item_id: str, turns: Mapping[str, StoredTurn]) -> Any:
    """The reasoning, the text or the call that an item's id names."""
    item = output_item(item_id)
    turn = turns.get(find_proof(item_id) or "")
    if item is None or turn is None:
        raise InvalidRequest(f"item_reference {item_id} names no output item of this session")
    reply: Any = msgspec.json.decode(turn.messages[-1])
    if item[0] == REASONING:
        return reply.get("reasoning_content") or reply.get("reasoning")
    if item[0] == MESSAGE:
        return reply.get("content")
    calls = reply.get("tool_calls") or []
    if item[1] >= len(calls):
        raise InvalidRequest(f"item_reference {item_id} names no output item of this session")
    return calls[item[1]]


MAX_PROOFS = 1000
"""The newest that are read: they tell which of several equal turns a history continues."""

_TRIGGER = msgspec.json.encode([TRIGGER_ITEM])

_NO_INPUT = "input must not be empty"


def parse_responses(
    body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None, *, compacts: bool = False
) -> ChatRequest:
    """As `chat.parse.parse_chat`. What needs a stored turn is left to `stored.complete`. `compacts`: the history is to
    be compacted, as with `compaction_trigger` at its end."""
    given, many_values = fields_of(body, has_few_values, continued)
    if "messages" in given:
        raise InvalidRequest("messages is not a field of this protocol; use input")
    stream = "stream" in given and flag(given.pop("stream"), "stream")
    if stream and compacts:
        raise unsupported("stream")
    mode = stream_mode(given) if "stream_mode" in given else None
    if "n" in given:
        require_one(given.pop("n"))
    prompt_ids = token_ids(given.pop("input_ids"), "input_ids") if "input_ids" in given else None
    raw_input = given.pop("input", None)
    given = engine_params(given, many_values)
    text_or_none(value_of(given.get("model"), "model"), "model")
    parameters = Parameters(given)
    instructions = text_or_none(parameters.take("instructions"), "instructions")
    previous_id = text_or_none(parameters.take("previous_response_id"), "previous_response_id")
    previous = None if previous_id is None else response_proof(previous_id)
    if previous_id is not None and previous is None:
        raise PreviousResponseNotFound("previous_response_id names no response of this session")
    if compacts and previous is not None and continued is None and bytes(raw_input or b"null") == b"null":
        raw_input = msgspec.Raw(_TRIGGER)
    conversation, layout, states = _conversation(
        body, raw_input, many_values, continued, continues=previous is not None
    )
    retained = _retained(raw_input, continued) if compacts else []
    if compacts and not conversation.compacts:
        conversation.add(TRIGGER_ITEM, "input")
    tools = read_tools(given.pop("tools", None))
    if conversation.more_tools:
        tools = collect(conversation.more_tools, tools)
    choice = parameters.take("tool_choice")
    chosen, offered = read_choice("none" if conversation.compacts else choice, tools)
    parameters.read()
    if chosen is not None:
        parameters.send("tool_choice", chosen)
    params = {**given, **parameters.params}
    if conversation.begins_reply():
        params |= prefill.PARAMS
    offered_tools = tools.raw(offered)
    if offered_tools is None:
        params.pop("parallel_tool_calls", None)
    shown = {**parameters.shown, "instructions": instructions, "tool_choice": choice or "auto"}
    shown |= {"tools": tools.shown, "previous_response_id": previous and RESPONSE + previous}
    # With sorted keys, so that a client's order of fields does not make it another one.
    echo = Echo(shown, tools.named, parameters.encrypted, parameters.logprobs, conversation.compacts, retained)
    references = [proof for proof in conversation.references if proof != previous]
    messages = conversation.raw("" if previous else instructions or "")
    if layout is not None:
        layout.translation = Translation(messages, states)
    return ChatRequest(
        messages,
        offered_tools,
        params,
        stream,
        prompt_ids,
        control.remove_control(params) if control.EXTENSIONS in params else None,
        "responses",
        msgspec.json.encode(echo, order="sorted"),
        tuple(filter(None, (previous, *conversation.proofs[-MAX_PROOFS:]))),
        previous,
        tuple(references),
        stream_mode=mode,
        layout=layout,
        prefix=None if continued is None or layout is None else continued.translated(messages),
        left_out=(*tools.left_out, *conversation.left_out, *parameters.left_out),
        call_ids=None if previous or references else conversation.call_ids,
    )


def _retained(raw: msgspec.Raw | None, continued: ContinuedBody | None) -> list[dict[str, Any]]:
    """The user's own messages of an input, which stay beside its summary."""
    listed = None if raw is None else value_of(raw, "input")
    if isinstance(listed, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": listed}]}]
    given = listed if continued is None else [value_of(item, "input") for item in continued.messages]
    return [item for item in given or () if isinstance(item, dict) and item.get("role") == "user"]


def _conversation(
    body: bytes, raw: msgspec.Raw | None, many_values: bool, continued: ContinuedBody | None, *, continues: bool
) -> tuple[Conversation, KnownBody | None, Sequence[State]]:
    """The conversation of the input, and its states and the body's layout if all of its messages are in the body.

    Raises InvalidRequest, and Unsupported for an item that cannot be carried.
    """
    conversation = Conversation(continues)
    if raw is not None and bytes(raw)[:1] == b'"':
        asked = text(value_of(raw, "input"), "input")
        if not asked:
            raise InvalidRequest(_NO_INPUT)
        conversation.add({"role": "user", "content": asked}, "input")
        return conversation, None, ()
    items, layout = items_of(body, "input", raw, many_values, continued)
    known = None if continues else continued
    conversation, states = translated(conversation, items, known, keeps_states=layout is not None)
    if conversation.is_empty:
        raise InvalidRequest(_NO_INPUT)
    return conversation, None if continues or conversation.references else layout, states
