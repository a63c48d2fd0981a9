"""Whether the export of clients' sessions is what the engine said, and what was computed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from integration.proxy import RecordingProxy
from integration.stand import Stand
from integration.tito import checked

from ops.server import OwnProcess
from real_engine.clients import Client
from real_engine.table import Found
from tests.tools.real_engine.models import Rescored, rescored
from tests.tools.real_sglang.plays import logprobs_of

Reply = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """A server between its clients and an engine whose every word is recorded. `builds_prompts`: it has a tokenizer.
    `is_scripted`: what the engine samples is no model's."""

    stand: Stand
    proxy: RecordingProxy
    model: Path
    builds_prompts: bool
    is_scripted: bool = False

    def replies(self) -> dict[str, Reply]:
        """What the engine generated, by the id of its reply; a pause's reply has none."""
        return {reply["id"]: reply for reply in map(json.loads, filter(None, self.proxy.replies)) if "id" in reply}

    def rescored(self, rows: Sequence[Mapping[str, Any]]) -> Rescored:
        """The rows' logprobs beside those that the model, or the script, has for the rows' tokens."""
        return replayed(rows) if self.is_scripted else rescored(self.model, rows)


@contextlib.contextmanager
def laid(
    folder: Path, engine: OwnProcess, model: Path, environment: Mapping[str, str], *, is_scripted: bool
) -> Iterator[Lane]:
    """A lane whose store must be sound in the end."""
    with (
        RecordingProxy(engine.base_url) as proxy,
        checked(folder, proxy.base_url, environment=environment) as stand,
    ):
        yield Lane(stand, proxy, model, builds_prompts="TURNLOG_TOKENIZER" in environment, is_scripted=is_scripted)


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
    scored = lane.rescored(rows)
    assert scored.tokens == sampled, "tokens are in the loss that no turn sampled"
    found.sessions += len(clients)
    found.rows += len(rows)
    found.rescored += scored.tokens
    found.difference = max(found.difference, scored.largest)


def count(found: Found, row: dict[str, Any], span: dict[str, Any], said: Reply) -> None:
    """One turn of a row beside the engine's reply, number by number."""
    start, end = span["output_start"], span["end"]
    prompt, sampled, logprobs = said_in(said)
    assert row["loss_mask"][start:end] == [1] * len(sampled)
    found.wrong_ids += _differing(row["tokens"][:start], prompt) + _differing(row["tokens"][start:end], sampled)
    found.wrong_logprobs += _differing(row["logprobs"][start:end], logprobs)


def said_in(said: Reply) -> tuple[list[int], list[int], list[float]]:
    """The prompt's ids, the sampled ones and their logprobs, where each engine and protocol has them."""
    [choice] = said["choices"]
    prompt = said.get("prompt_token_ids") or choice["prompt_token_ids"]
    if "meta_info" in choice:
        logprobs, ids = zip(*(one[:2] for one in choice["meta_info"]["output_token_logprobs"]), strict=True)
        return prompt, list(ids), list(logprobs)
    logprobs = choice["logprobs"].get("token_logprobs") or [one["logprob"] for one in choice["logprobs"]["content"]]
    return prompt, choice["token_ids"], logprobs


def replayed(rows: Sequence[Mapping[str, Any]]) -> Rescored:
    """Compare the logprobs of exported rows with the script's, which are made of all tokens up to each."""
    differences = [
        abs(exported - scripted)
        for row in rows
        for exported, scripted, is_sampled in zip(
            row["logprobs"], logprobs_of([], row["tokens"]), row["loss_mask"], strict=True
        )
        if is_sampled
    ]
    return Rescored(len(rows), len(differences), max(differences, default=0.0))


def _differing(one: Sequence[float], other: Sequence[float]) -> int:
    return sum(a != b for a, b in zip_longest(one, other))
