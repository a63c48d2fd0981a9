"""Is everything that an agent was told still there? The export and the log, held against what agents saw."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.domain.events import TYPES, Recorded, TurnAbandoned, TurnCommitted, UnknownEvent
from app.domain.session import Session, fold
from ops.demo.agent import Acknowledged, Agent

Row = Mapping[str, Any]


@dataclass(slots=True)
class Findings:
    """What was found, and in `problems` what should not have been."""

    acknowledged: int = 0
    committed: int = 0
    abandoned: int = 0
    folded: int = 0
    problems: list[str] = field(default_factory=list)


def read_log(session_id: str, lines: Iterable[str]) -> tuple[Session | None, list[Recorded]]:
    """The fold of a session's events as `GET …/events` gave them. Raises UnknownEvent, msgspec.ValidationError."""
    recorded = []
    for line in lines:
        fields = json.loads(line)
        seq, at, name = fields.pop("seq"), fields.pop("at"), fields.pop("type")
        recorded.append(Recorded(seq, at, msgspec.convert(fields, TYPES[name])))
    return fold(session_id, recorded), recorded


def check(agents: Sequence[Agent], rows: Sequence[Row], logs: Mapping[str, Sequence[str]]) -> Findings:
    """Every acknowledged turn must be in `rows` with its tokens and text, and every log must fold to it."""
    found = Findings()
    for agent in agents:
        own = [row for row in rows if row["session_id"] == agent.session_id]
        for seen in agent.seen:
            found.acknowledged += 1
            found.problems += [f"{agent.name}, turn {seen.turn}: {what}" for what in _missing(seen, own)]
        found.problems += [f"{agent.name}: {what}" for what in _log_problems(agent, logs[agent.session_id], found)]
    return found


def _log_problems(agent: Agent, lines: Sequence[str], found: Findings) -> Iterable[str]:
    try:
        session, recorded = read_log(agent.session_id, lines)
    except (UnknownEvent, msgspec.ValidationError) as error:
        yield f"the log does not fold: {error}"
        return
    found.folded += 1
    found.committed += sum(isinstance(entry.event, TurnCommitted) for entry in recorded)
    found.abandoned += sum(isinstance(entry.event, TurnAbandoned) for entry in recorded)
    live = () if session is None else session.path
    if live != tuple(seen.turn for seen in agent.seen):
        yield f"the log's live turns are {live}, the agent saw {[seen.turn for seen in agent.seen]}"


def _missing(seen: Acknowledged, rows: Sequence[Row]) -> Iterable[str]:
    """What an exported session lacks of one acknowledged turn."""
    places = [(row, span) for row in rows for span in row["turns"] if span["turn"] == seen.turn]
    if len(places) != 1:
        yield f"stands {len(places)} times in the export"
        return
    row, span = places[0]
    start, end = span["output_start"], span["end"]
    if end - start != seen.output_tokens or not all(row["sampled_mask"][start:end]):
        yield f"{end - start} tokens exported, {seen.output_tokens} were sampled"
    if seen.prompt_ids is not None and row["tokens"][:start] != seen.prompt_ids:
        yield "the prompt's token ids differ"
    if seen.output_ids is not None and row["tokens"][start:end] != seen.output_ids:
        yield "the sampled token ids differ"
    if seen.logprobs is not None and row["logprobs"][start:end] != seen.logprobs:
        yield "the logprobs differ"
    message = row["messages"][seen.place]
    calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    if (message.get("content") or "") != seen.text or calls != [(call.id, call.arguments) for call in seen.calls]:
        yield "the text or the tool calls differ"
