"""Checks that every reply an agent received is in the store and in the export."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.store.database import Database
from app.store.dialect import StorePoints
from app.turn.in_flight import hash_key
from ops import verify
from ops.demo.agent import Acknowledged, Agent

Row = Mapping[str, Any]


@dataclass(slots=True)
class Findings:
    """The counts of a check; `problems` are the deviations."""

    acknowledged: int = 0
    committed: int = 0
    abandoned: int = 0
    folded: int = 0
    problems: list[str] = field(default_factory=list)


async def check(
    database_url: str, agents: Sequence[Agent], rows: Sequence[Row], logs: Mapping[str, Sequence[str]]
) -> Findings:
    """Check that every acknowledged turn is in the store exactly once, and in `rows` with its tokens and text.

    `logs` are the events of each session, as returned by `GET …/events`.
    """
    types = Counter(json.loads(line)["type"] for lines in logs.values() for line in lines)
    found = Findings(committed=types["TurnCommitted"], abandoned=types["TurnAbandoned"])
    acknowledged = []
    for agent in agents:
        own = [row for row in rows if row["session_id"] == agent.session_id]
        for seen in agent.seen:
            acknowledged.append(verify.Acknowledged(agent.session_id, seen.turn, seen.reply_sha256, hash_key(seen.key)))
            found.problems += [f"{agent.name}, turn {seen.turn}: {what}" for what in _missing(seen, own)]
    found.acknowledged = len(acknowledged)
    database = Database(database_url, points=StorePoints())
    try:
        report = await verify.verify(database, acknowledged)
    finally:
        await database.close()
    found.folded = len(agents) - len({problem.session_id for problem in report.problems} & logs.keys())
    found.problems += [f"{problem.session_id}: {problem.what}" for problem in report.problems]
    if found.committed != found.acknowledged:
        found.problems.append(f"{found.committed} turns were committed, {found.acknowledged} acknowledged")
    return found


def _missing(seen: Acknowledged, rows: Sequence[Row]) -> Iterable[str]:
    """The differences between one acknowledged turn and the exported rows of its session."""
    places = [(row, span) for row in rows for span in row["turns"] if span["turn"] == seen.turn]
    if len(places) != 1:
        yield f"is {len(places)} times in the export"
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
    message = row["messages"][seen.message_index]
    calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    if (message.get("content") or "") != seen.text or calls != [(call.id, call.arguments) for call in seen.calls]:
        yield "the text or the tool calls differ"
