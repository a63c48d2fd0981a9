"""Sessions of every kind, made by a real server of real turns, and how to read each shape's rows of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.export import formats
from integration.places import Place
from integration.reading import Row, read
from integration.routing import BOTH
from integration.stand import WEATHER, Stand, Talk, serving, user

SHAPES = tuple(shape for shape in formats.SHAPES if not formats.takes_sessions(shape))
GENERATIONS = {"openenv": "turns", "rllm": "traces"}
"""Shapes with an entry for each generation that a row has in its loss, and where."""

SINGLE = tuple(shape for shape in SHAPES if shape != "atropos" and shape not in GENERATIONS)
EVERYTHING = {"explain": "true", "replay": "true", "advantage": "grpo"}
NESTED = {"indexer_topk": {"nested": True}}
"""Base64 tells no dimensions of positions, nested lists do."""


class Corpus:
    """Sessions of every kind, and one export's cursor; all is asked for as of that moment."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.talks: dict[str, Talk] = {}
        self._fill()
        first = stand.http.get("/export")
        assert first.status_code == 200
        self.cursor = first.headers["x-turnlog-cursor"]
        self.rows = self.read()

    def _talk(self, name: str, reward: float | None = None, **body: Any) -> Talk:
        talk = self.stand.talk(attempt=len(self.talks), metadata={"task": name, "env_name": "sums"}, **body)
        self.talks[name] = talk
        if reward is not None:
            assert self.stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
        return talk

    def _fill(self) -> None:
        tools = self._talk("tools", 1.0, group_id="7", rollback_window=3)
        tools.say("Weather?", tools=[WEATHER], sim={"tool_calls": True, **NESTED}, temperature=0.5)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "22 °C"}
            for call in tools.messages[-1]["tool_calls"]
        ]
        tools.add(*results, tools=[WEATHER], sim=NESTED)
        split = self._talk("split", 0.25, group_id="7")
        tooled: dict[str, Any] = {"tools": [WEATHER]}
        for text, more in (("1", {}), ("2", {}), ("3", tooled), ("4", tooled)):
            split.say(text, sim={"tool_calls": False, "weight_version": "3", **NESTED}, **more)
        cut = self._talk("cut", 0.0, group_id="7")
        cut.say("Long", sim={"finish_reason": "length", **NESTED})
        silent = self._talk("silent", -1.0)
        assert silent.chat([user("Hi")], sim={"completion_tokens": 1, "finish_reason": "abort"}).status_code == 200
        named = self._talk("named")
        named.say("Hello", sim={"weight_versions": ["a", "b"]})
        self._talk("empty", group_id="7")
        undone = self._talk("undone", 2.0)
        undone.say("One")
        kept = undone.messages
        undone.say("Two")
        undone.messages = kept
        undone.say("Instead")
        last = self._talk("last", 0.5, group_id="7")
        last.say("Bye", sim={"finish_reason": "abort"})
        gone = self._talk("gone", 3.0, group_id="gone")
        gone.say("Never")
        assert self.stand.http.delete(f"{gone.path}?erase=true").status_code == 204
        assert self.stand.http.delete(tools.path).status_code == 204

    def get(self, **query: Any) -> bytes:
        query = {"cursor": self.cursor, **query}
        response = self.stand.http.get("/export", params=query)
        assert response.status_code == 200, response.text
        return response.content

    def read(self, **query: Any) -> list[Row]:
        asked = {**EVERYTHING, **query}
        return read(asked.get("format", "ndjson"), self.get(**asked))

    def given(self, **query: Any) -> list[Row]:
        return [row for row in self.read(**query) if row.get("excluded") is None]

    def left_out(self, **query: Any) -> list[Row]:
        return [row for row in self.read(**query) if row.get("excluded") is not None]

    def name_of(self, session_id: str) -> str:
        return next(name for name, talk in self.talks.items() if talk.id == session_id)

    def turnlog(self, session_id: str, segment: int, **query: Any) -> Row:
        found = self.given(**query) if query else [row for row in self.rows if "excluded" not in row]
        return next(row for row in found if (row["session_id"], row["segment"]) == (session_id, segment))


@contextlib.contextmanager
def filled(where: Path | Place, engine: str) -> Iterator[Corpus]:
    """A corpus on a server of its own, which asks for replay payloads."""
    environment = {**BOTH, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    with serving(where, engine, environment=environment) as stand:
        yield Corpus(stand)


def parts(shape: str, row: Row) -> tuple[list[int], list[int], list[float]]:
    """Tokens, mask and logprobs of the whole sequence, as the trainer's layout says to read them."""
    match shape:
        case "turnlog":
            return row["tokens"], row["loss_mask"], row["logprobs"]
        case "miles" | "slime":
            before = len(row["tokens"]) - row["response_length"]
            return row["tokens"], [0] * before + row["loss_mask"], [0.0] * before + row["rollout_log_probs"]
        case "verl":
            before = len(row["prompt_ids"])
            tokens = row["prompt_ids"] + row["response_ids"]
            return tokens, [0] * before + row["response_mask"], [0.0] * before + row["response_logprobs"]
        case "skyrl":
            before = len(row["prompt_token_ids"])
            tokens = row["prompt_token_ids"] + row["response_ids"]
            return tokens, [0] * before + row["loss_masks"], [0.0] * before + row["rollout_logprobs"]
        case "trl":
            before = len(row["prompt_ids"])
            tokens = row["prompt_ids"] + row["completion_ids"]
            return tokens, [0] * before + row["env_mask"], [0.0] * before + row["logprobs"]
        case "tinker":
            assert row["model_input"][1:] == row["target_tokens"][:-1]
            tokens = row["model_input"][:1] + row["target_tokens"]
            return tokens, [0, *(int(one) for one in row["mask"])], [0.0, *row["logprobs"]]
        case "trl-async":
            return row["input_ids"], row["completion_mask"], row["old_log_probs"]
        case "xtuner":
            mask = [int(label != -100) for label in row["labels"]]
            in_loss = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
            assert row["response_ids"] == in_loss
            return row["input_ids"], mask, row["logprobs"]
        case "areal":
            assert row["attention_mask"] == [[True] * len(row["input_ids"][0])]
            return row["input_ids"][0], row["loss_mask"][0], row["logprobs"][0]
    assert shape == "prime-rl"
    return row["token_ids"], [int(one) for one in row["mask"]], row["logprobs"]


def identity(shape: str, row: Row) -> Row:
    if shape in ("miles", "slime"):
        found: Row = row["metadata"]["turnlog"]
        return found
    return row["extra_fields"] if shape in ("verl", "trl-async", "xtuner") else row


def generations(shape: str, row: Row) -> list[tuple[int, list[int], list[int], list[float]]]:
    """Each entry's turn, prompt, output and the output's logprobs."""
    if shape == "openenv":
        for one in row["turns"]:
            assert one["loss_mask"] == [0] * len(one["prompt_token_ids"]) + [1] * len(one["completion_token_ids"])
    logprobs = {"openenv": "per_token_logps", "rllm": "logprobs"}[shape]
    return [
        (one["metadata"]["turn"], one["prompt_token_ids"], one["completion_token_ids"], one[logprobs])
        for one in row[GENERATIONS[shape]]
    ]


def sampled(whole: Row) -> list[tuple[int, list[int], list[int], list[float]]]:
    """The same of a row of Turnlog's own shape."""
    spans = [(turn["turn"], turn["output_start"], turn["end"]) for turn in whole["turns"]]
    tokens, logprobs = whole["tokens"], whole["logprobs"]
    return [
        (turn, tokens[:start], tokens[start:end], logprobs[start:end])
        for turn, start, end in spans
        if any(whole["loss_mask"][start:end])
    ]
