"""The format `atif`: a segment as a trajectory in Harbor's Agent Trajectory Interchange Format, version 1.8.

https://harborframework.com/docs/trajectory-format. A system, user or assistant message is a step; a tool's result
stands in the observation of the step that called. Messages of earlier segments, which this one continues, are marked
`is_copied_context`: a trainer has them in their own segment's trajectory. An assistant message that the client put
into a prompt has no `metrics`. Keys without a value are left out, as ATIF's readers expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

import msgspec

from app.domain.images import REFERENCE
from app.domain.samples import Sample, TurnSpan
from app.export.row import Columns, Fields, Row, TurnContent, Unfit, Value
from app.export.shapes import shared
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


SCHEMA_VERSION = "ATIF-v1.8"

AGENT = "turnlog"
"""ATIF wants the harness' name; Turnlog only knows its own."""

PROMPT_IDS = 1 << 20
"""How many prompt ids a trajectory may repeat: T turns have T prompts, each with all that came before."""

NOTES = "metrics.prompt_token_ids stands at the last agent step alone; earlier prompts are its first prompt_tokens ids"

COLUMNS: Columns = {
    "schema_version": "text",
    "session_id": "text",
    "trajectory_id": "text",
    "agent": "json",
    "steps": "json",
    "notes": "text",
    "final_metrics": "json",
    "extra": "json",
}


def _given(**values: Value) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


def fields(row: Row) -> Fields:
    """Raises Unfit for a message that is no chat message."""
    turns, spans = list(row.turns), row.sample.turns
    repeated = sum(span.output_start for span in spans) <= PROMPT_IDS
    steps = _steps(row, turns, repeated)
    tools = next((turn.tools for turn in reversed(turns) if turn.tools is not None), None)
    cached = [turn.event.cached_tokens for turn in turns if turn.event.cached_tokens is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": row.session.session_id,
        "trajectory_id": f"{row.session.session_id}/{row.sample.segment}",
        "agent": _given(
            name=AGENT,
            version=row.source.turnlog_version,
            model_name=shared.model_of(turns[0].params),
            tool_definitions=None if tools is None else msgspec.Raw(tools),
        ),
        "steps": steps,
        **_given(notes=None if repeated else NOTES),
        "final_metrics": _given(
            total_prompt_tokens=sum(
                # Of text alone, as its upstream counts.
                turn.event.suffix_tokens if turn.event.is_text else span.output_start
                for turn, span in zip(turns, spans, strict=True)
            ),
            total_completion_tokens=sum(turn.event.output_tokens for turn in turns),
            total_cached_tokens=sum(cached) if cached else None,
            total_steps=len(steps),
        ),
        "extra": {
            **shared.identity(row),
            "as_of_seq": row.session.version,
            "segment_cause": row.sample.cause,
            "reward": row.reward,
            "reward_components": row.reward_components,
            "advantage": row.advantage,
            "metadata": msgspec.Raw(row.metadata or b"{}"),
            **shared.rollout(row),
        },
    }


def _steps(row: Row, turns: list[TurnContent], repeated: bool) -> list[Fields]:
    """The copied messages, then each turn's. A session of completions by ids has no messages but its turns'.

    Turns that a fork copied are marked as well.
    """
    own = sum(len(turn.messages) + 1 for turn in turns)
    steps = Steps()
    for raw in row.messages[: max(0, len(row.messages) - own)]:
        steps.add(read_message(raw), is_copied_context=True)
    for turn, span in zip(turns, row.sample.turns, strict=True):
        event = turn.event
        mark = {"is_copied_context": True} if event.turn <= row.session.context_turns else {}
        for raw in turn.messages:
            steps.add(read_message(raw), timestamp=_iso(event.requested_at), **mark)
        more = _given(
            timestamp=_iso(turn.at),
            model_name=shared.model_of(turn.params),
            metrics=_metrics(row.sample, turn, span, with_prompt=repeated or turn is turns[-1]),
            llm_call_count=1,
            extra={
                "turn": event.turn,
                "finish_reason": event.finish_reason,
                "weight_versions": [msgspec.structs.asdict(version) for version in event.weight_versions],
            },
        )
        steps.add(read_message(turn.message), **more, **mark)
    return steps.fields()


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
        text, others = content(message.content)
        if message.role == "assistant":
            step = self._agent = self._step("agent", text)
            if reasoning := message.reasoning_content or message.reasoning:
                step.fields["reasoning_content"] = reasoning
            if calls := message.tool_calls:
                ids = [call.id or f"{step.fields['step_id']}.{index}" for index, call in enumerate(calls)]
                step.fields["tool_calls"] = [_tool_call(call, name) for call, name in zip(calls, ids, strict=True)]
                self._callers.update(dict.fromkeys(ids, step))
        else:
            step = self._step("system" if message.role in ("system", "developer") else "user", text)
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


def _tool_call(call: _Call, name: str) -> Fields:
    """Arguments are an object; beside an empty one stands the text that was sampled where it is none, as models do
    write."""
    if call.custom is not None:
        return {"tool_call_id": name, "function_name": call.custom.name, "arguments": {"input": call.custom.input}}
    function = call.function or _Function()
    given, unread = function.arguments or {}, None
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            given, unread = {}, given
    made: dict[str, Value] = {"tool_call_id": name, "function_name": function.name, "arguments": given}
    return made if unread is None else {**made, "extra": {"arguments": unread}}


def _metrics(sample: Sample, turn: TurnContent, span: TurnSpan, *, with_prompt: bool) -> Fields:
    """`prompt_token_ids` is the whole prompt, as ATIF has it.

    Output tokens that the next prompt trimmed, or behind which the row was cut, are counted but not among the ids,
    which are the sample's.
    """
    counts = {"completion_tokens": turn.event.output_tokens, "cached_tokens": turn.event.cached_tokens}
    if turn.event.is_text:
        return _given(prompt_tokens=turn.event.suffix_tokens, **counts)
    missing = turn.event.output_tokens - (span.end - span.output_start)
    name = "cut_tokens" if span is sample.turns[-1] else "trimmed_tokens"
    return _given(
        prompt_tokens=span.output_start,
        **counts,
        prompt_token_ids=sample.tokens[: span.output_start] if with_prompt else None,
        completion_token_ids=sample.tokens[span.output_start : span.end],
        logprobs=sample.logprobs[span.output_start : span.end],
        extra={name: missing} if missing else None,
    )


def _iso(seconds: float) -> str:
    """Raises Unfit for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError) as error:
        raise Unfit("a time of it is out of range") from error


IMAGES = {"jpg": "image/jpeg", "jpeg": "image/jpeg", "png": "image/png", "gif": "image/gif", "webp": "image/webp"}
"""Media types that ATIF takes, by a URL's ending."""

AUDIO = {
    "mp3": "audio/mpeg",
    **{name: f"audio/{name}" for name in ("wav", "mp4", "aac", "ogg", "flac", "webm", "aiff")},
}
"""Media types that ATIF takes, by the name that an OpenAI request has for the format."""


class _Url(msgspec.Struct, frozen=True):
    url: str = ""


class _Audio(msgspec.Struct, frozen=True):
    data: str
    format: str


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    image_url: _Url | None = None
    sha256: str | None = None
    media_type: str | None = None
    input_audio: _Audio | None = None


describe(_Part)


def content(given: str | Sequence[msgspec.Raw] | None) -> tuple[Value, list[msgspec.Raw]]:
    """A message's text or parts, and raw what ATIF has no part for: other kinds, images of an unknown type."""
    if given is None or isinstance(given, str):
        return given or "", []
    parts: list[dict[str, Value]] = []
    others: list[msgspec.Raw] = []
    for raw in given:
        part = _part(raw)
        if part is None:
            others.append(raw)
        else:
            parts.append(part)
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"], others
    return parts or "", others


def _part(raw: msgspec.Raw) -> dict[str, Value] | None:
    try:
        part = msgspec.json.decode(raw, type=_Part)
    except msgspec.DecodeError:
        return None
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == REFERENCE:
        kind, media_type, path = "image", part.media_type, f"sha256:{part.sha256}"
        media_type = media_type if media_type in IMAGES.values() else None
    elif part.type == "image_url" and part.image_url is not None:
        kind, media_type, path = "image", _image_type(part.image_url.url), part.image_url.url
    elif part.type == "input_audio" and part.input_audio is not None:
        media_type = AUDIO.get(part.input_audio.format)
        kind, path = "audio", f"data:{media_type};base64,{part.input_audio.data}"
    else:
        return None
    return None if media_type is None else {"type": kind, "source": {"media_type": media_type, "path": path}}


def _image_type(url: str) -> str | None:
    if url.startswith("data:"):
        named = url[len("data:") :].split(",", 1)[0].split(";", 1)[0].lower()
        return named if named in IMAGES.values() else None
    try:
        path = urlsplit(url).path
    except ValueError:
        return None
    return IMAGES.get(path.rpartition(".")[2].lower())
