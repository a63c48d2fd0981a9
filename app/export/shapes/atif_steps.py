"""From chat messages to ATIF's steps."""

from __future__ import annotations

import msgspec

from app.export.row import Fields, Unfit, Value
from app.export.shapes.atif_content import content
from workers.codec import describe


class _Function(msgspec.Struct, frozen=True):
    name: str = ""
    arguments: str | dict[str, msgspec.Raw] | None = None


class _Custom(msgspec.Struct, frozen=True):
    """A tool that takes a text instead of an object."""

    name: str = ""
    input: str = ""


class _Call(msgspec.Struct, frozen=True):
    id: str | None = None
    function: _Function | None = None
    custom: _Custom | None = None


class Message(msgspec.Struct, frozen=True):
    """What ATIF has a place for. Engines call the reasoning by one of two names."""

    role: str
    content: str | list[msgspec.Raw] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


describe(Message)


def read_message(raw: bytes) -> Message:
    """Raises Unfit for what is no chat message."""
    try:
        return msgspec.json.decode(raw, type=Message)
    except msgspec.DecodeError as error:
        raise Unfit("a message cannot be read as a chat message") from error


class _Step(msgspec.Struct):
    fields: dict[str, Value]
    results: list[Value] = []


class Steps:
    """Steps in the making: a tool's result goes to the latest one that has its call."""

    def __init__(self) -> None:
        self._made: list[_Step] = []
        self._agent: _Step | None = None
        self._callers: dict[str, _Step] = {}

    def add(self, message: Message, **more: Value) -> None:
        """`more` are fields of the message's step; a tool's result, which has no step of its own, has none."""
        if message.role in ("tool", "function"):
            self._observe(message)
            return
        source = _source(message.role)
        text, others = content(message.content)
        step = self._step(source, text)
        if source == "agent":
            self._agent = step
            self._speak(step, message)
        step.fields.update(more)
        if others:
            given = more.get("extra")
            step.fields["extra"] = {**(given if isinstance(given, dict) else {}), "content_parts": others}

    def fields(self) -> list[Fields]:
        return [
            {**step.fields, "observation": {"results": step.results}} if step.results else step.fields
            for step in self._made
        ]

    def _step(self, source: str, text: Value) -> _Step:
        step = _Step({"step_id": len(self._made) + 1, "source": source, "message": text})
        self._made.append(step)
        return step

    def _speak(self, step: _Step, message: Message) -> None:
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            step.fields["reasoning_content"] = reasoning
        calls = message.tool_calls or []
        if calls:
            ids = [call.id or f"{step.fields['step_id']}.{index}" for index, call in enumerate(calls)]
            step.fields["tool_calls"] = [_tool_call(call, name) for call, name in zip(calls, ids, strict=True)]
            self._callers.update(dict.fromkeys(ids, step))

    def _observe(self, message: Message) -> None:
        """A result whose call is not known is the latest agent's, without a call; before any, a system's."""
        name = message.tool_call_id
        caller = None if name is None else self._callers.get(name)
        text, others = content(message.content)
        result: dict[str, Value] = {"content": text}
        extra: dict[str, Value] = {"content_parts": others} if others else {}
        if caller is not None:
            result["source_call_id"] = name
        elif name is not None:
            extra["tool_call_id"] = name
        if extra:
            result["extra"] = extra
        (caller or self._agent or self._step("system", "")).results.append(result)


def _source(role: str) -> str:
    if role == "assistant":
        return "agent"
    return "system" if role in ("system", "developer") else "user"


def _tool_call(call: _Call, name: str) -> Fields:
    if call.custom is not None:
        return {"tool_call_id": name, "function_name": call.custom.name, "arguments": {"input": call.custom.input}}
    function = call.function or _Function()
    arguments, unread = _arguments(function.arguments)
    made: dict[str, Value] = {"tool_call_id": name, "function_name": function.name, "arguments": arguments}
    return made if unread is None else {**made, "extra": {"arguments": unread}}


def _arguments(given: str | dict[str, msgspec.Raw] | None) -> tuple[Value, str | None]:
    """An object; and the text as it was sampled where it is none, as models do write."""
    if not given:
        return {}, None
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return {}, str(given)
    return dict(given), None
