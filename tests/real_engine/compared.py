"""Whether the export of clients' sessions is what the engine said, and what the model computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from integration.proxy import RecordingProxy
from integration.stand import Stand

from real_engine.clients import Client
from real_engine.table import Found
from tests.tools.real_engine.models import rescored

Reply = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """A server between its clients and an engine whose every word is recorded. `builds_prompts`: it has a tokenizer."""

    stand: Stand
    proxy: RecordingProxy
    model: Path
    builds_prompts: bool

    def replies(self) -> dict[str, Reply]:
        """What the engine generated, by the id of its reply; a pause's reply has none."""
        return {reply["id"]: reply for reply in map(json.loads, self.proxy.replies) if "id" in reply}


def compare(lane: Lane, clients: Sequence[Client], found: Found) -> None:
    """Count what was acknowledged and is not there, what is there twice, and what is there and was said otherwise."""
    replies = lane.replies()
    rows: list[dict[str, Any]] = []
    sampled = 0
    for client in clients:
        records = {record["turn"]: record["response"] for record in client.talk.state()["records"]}
        own = client.talk.rows()
        spans = [(row, span) for row in own for span in row["turns"]]
        exported = [client.name_of(span["turn"], records[span["turn"]]) for _, span in spans]
        found.turns += len(client.acknowledged)
        found.lost += len(set(client.acknowledged) - set(exported))
        found.doubled += max(len(exported), len(client.talk.committed())) - len(set(exported))
        for row, span in spans:
            said = records[span["turn"]]
            if span["parts"]:
                found.joined += 1
            else:
                assert said == replies[said["id"]], f"turn {span['turn']} is recorded otherwise than it was said"
            count(found, row, span, said)
            sampled += span["end"] - span["output_start"]
        rows += own
    scored = rescored(lane.model, rows)
    assert scored.tokens == sampled, "tokens are in the loss that no turn sampled"
    found.sessions += len(clients)
    found.rows += len(rows)
    found.rescored += scored.tokens
    found.difference = max(found.difference, scored.largest)


def count(found: Found, row: dict[str, Any], span: dict[str, Any], said: Reply) -> None:
    """One turn of a row beside the engine's reply, number by number."""
    [choice] = said["choices"]
    start, end = span["output_start"], span["end"]
    prompt = said.get("prompt_token_ids") or choice["prompt_token_ids"]
    logprobs = choice["logprobs"].get("token_logprobs") or [one["logprob"] for one in choice["logprobs"]["content"]]
    assert row["loss_mask"][start:end] == [1] * len(choice["token_ids"])
    found.wrong_ids += _differing(row["tokens"][:start], prompt) + _differing(
        row["tokens"][start:end], choice["token_ids"]
    )
    found.wrong_logprobs += _differing(row["logprobs"][start:end], logprobs)


def _differing(one: Sequence[float], other: Sequence[float]) -> int:
    return sum(a != b for a, b in zip_longest(one, other))
