"""The format `atif`: a segment as a trajectory in Harbor's Agent Trajectory Interchange Format, version 1.8.

https://harborframework.com/docs/trajectory-format. A system, user or assistant message is a step; a tool's result
stands in the observation of the step that called. Messages of earlier segments, which this one continues, are marked
`is_copied_context`: a trainer has them in their own segment's trajectory. An assistant message that the client put
into a prompt has no `metrics`. Keys without a value are left out, as ATIF's readers expect.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from app.domain.samples import Sample, TurnSpan
from app.export.columns import Columns
from app.export.row import Fields, Row, TurnContent, Unfit, Value
from app.export.shapes import identity
from app.export.shapes.atif_steps import Steps, read_message
from workers.codec import describe

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


class _Params(msgspec.Struct, frozen=True):
    model: object = None


describe(_Params)


def fields(row: Row) -> Fields:
    """Raises Unfit for a message that is no chat message."""
    turns = list(row.turns)
    repeated = sum(span.output_start for span in row.sample.turns) <= PROMPT_IDS
    steps = _steps(row, turns, repeated)
    tools = next((turn.tools for turn in reversed(turns) if turn.tools is not None), None)
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": row.session.session_id,
        "trajectory_id": f"{row.session.session_id}/{row.sample.segment}",
        "agent": _given(
            name=AGENT,
            version=row.source.turnlog_version,
            model_name=_model(turns[0]),
            tool_definitions=None if tools is None else msgspec.Raw(tools),
        ),
        "steps": steps,
        **_given(notes=None if repeated else NOTES),
        "final_metrics": _totals(row.sample, turns, len(steps)),
        "extra": _extra(row),
    }


def _given(**values: Value) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


def _extra(row: Row) -> Fields:
    given = row.session.reward
    return {
        **identity.fields(row),
        "as_of_seq": row.session.version,
        "segment_cause": row.sample.cause,
        "reward": row.reward,
        "reward_components": {} if given is None else given.components,
        "advantage": row.advantage,
        "metadata": msgspec.Raw(row.metadata or b"{}"),
        **identity.rollout(row),
    }


def _totals(sample: Sample, turns: list[TurnContent], steps: int) -> Fields:
    cached = [turn.event.cached_tokens for turn in turns if turn.event.cached_tokens is not None]
    return _given(
        total_prompt_tokens=sum(span.output_start for span in sample.turns),
        total_completion_tokens=sum(turn.event.output_tokens for turn in turns),
        total_cached_tokens=sum(cached) if cached else None,
        total_steps=steps,
    )


def _steps(row: Row, turns: list[TurnContent], repeated: bool) -> list[Fields]:
    """The copied messages, then each turn's. A session of completions by ids has no messages but its turns'.

    Turns that a fork copied are marked as well.
    """
    own = sum(len(turn.messages) + 1 for turn in turns)
    steps = Steps()
    for raw in row.messages[: max(0, len(row.messages) - own)]:
        steps.add(read_message(raw), is_copied_context=True)
    for turn, span in zip(turns, row.sample.turns, strict=True):
        mark = {"is_copied_context": True} if turn.event.turn <= row.session.context_turns else {}
        for raw in turn.messages:
            steps.add(read_message(raw), timestamp=_iso(turn.event.requested_at), **mark)
        more = _given(
            timestamp=_iso(turn.at),
            model_name=_model(turn),
            metrics=_metrics(row.sample, turn, span, with_prompt=repeated or turn is turns[-1]),
            llm_call_count=1,
            extra=_turn_extra(turn),
        )
        steps.add(read_message(turn.message), **more, **mark)
    return steps.fields()


def _metrics(sample: Sample, turn: TurnContent, span: TurnSpan, *, with_prompt: bool) -> Fields:
    """`prompt_token_ids` is the whole prompt, as ATIF has it.

    Output tokens that the next prompt trimmed, or behind which the row was cut, are counted but not among the ids,
    which are the sample's.
    """
    missing = turn.event.output_tokens - (span.end - span.output_start)
    name = "cut_tokens" if span is sample.turns[-1] else "trimmed_tokens"
    return _given(
        prompt_tokens=span.output_start,
        completion_tokens=turn.event.output_tokens,
        cached_tokens=turn.event.cached_tokens,
        prompt_token_ids=sample.tokens[: span.output_start] if with_prompt else None,
        completion_token_ids=sample.tokens[span.output_start : span.end],
        logprobs=sample.logprobs[span.output_start : span.end],
        extra={name: missing} if missing else None,
    )


def _turn_extra(turn: TurnContent) -> Fields:
    event = turn.event
    return {
        "turn": event.turn,
        "finish_reason": event.finish_reason,
        "weight_versions": [msgspec.structs.asdict(span) for span in event.weight_versions],
    }


def _model(turn: TurnContent) -> str | None:
    """None where the request names none, or none that is text."""
    try:
        named = msgspec.json.decode(turn.params, type=_Params).model
    except msgspec.DecodeError:
        return None
    return named if isinstance(named, str) else None


def _iso(seconds: float) -> str:
    """Raises Unfit for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError) as error:
        raise Unfit("a time of it is out of range") from error
