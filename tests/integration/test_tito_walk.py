"""Random walks over one session whose prompts are built here: whatever happens, the tokens are exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from integration.places import Places
from integration.stand import WEATHER, Message, Stand, Talk, user
from integration.tito import checked, require_consistent, require_sound
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

STEPS = 30
WINDOW = 2
WORDS = ("alpha", "beta straße", "你好", "<tool_call>", "gamma\n\ndelta", " space ", "<|im_end|>", "<think>", "0 1 2")
FAILURES = {"status_500": 500, "not_json": 502, "other_prompt": 500, "nan_logprob": 502}


@pytest.fixture(scope="module")
def walked(sglang: SimulatorProcess, tokenizer: str, places: Places) -> Iterator[Stand]:
    environment = {"TURNLOG_TOKENIZER": tokenizer, "TURNLOG_CACHE_BYTES": "20000"}
    with checked(places.new("walked"), sglang.base_url, environment=environment) as made:
        yield made


class Walk:
    """One session, and what a client may do to it; `starts` are where the live turns' requests ended."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self._rng = random.Random(seed)
        self._stand = stand
        self.talk: Talk = stand.talk(rollback_window=WINDOW)
        self._tools: list[Message] | None = [WEATHER]
        self._last: tuple[dict[str, Any], dict[str, str]] | None = None
        self._starts: list[int] = []

    def step(self) -> str:
        names, weights = zip(*self._ways().items(), strict=True)
        [name] = self._rng.choices(names, weights)
        getattr(self, name)()
        return str(name)

    def _ways(self) -> dict[str, int]:
        if not self._starts:
            return {"turn": 1}
        return {"turn": 12, "rollback": 4, "repeat": 2, "failure": 3, "other_tools": 1}

    def turn(self) -> None:
        self._ask([*self._history(), *self._new()])

    def rollback(self) -> None:
        back = self._rng.randint(1, min(WINDOW, len(self._starts)))
        end = self._starts[-back]
        kept = self.talk.messages[:end]
        # Another beginning, with nothing sampled before it, would be another conversation.
        if self._rng.random() < 0.5 and back < len(self._starts):
            kept = [*kept[:-1], user(self._text())] if kept[-1]["role"] == "user" else kept
        before = self.talk.events()[-1]["seq"]
        del self._starts[-back:]
        self._ask(kept)
        rolled = [event for event in self.talk.events(before) if event["type"] == "RolledBack"]
        assert [len(event["discarded"]) for event in rolled] == [back]

    def repeat(self) -> None:
        """A marked retry of the last turn changes nothing."""
        if self._last is None:
            return
        body, headers = self._last
        count = len(self.talk.committed())
        again = self.talk.chat(body["messages"], headers=headers, **{k: v for k, v in body.items() if k != "messages"})
        assert (again.status_code, again.headers["x-turnlog-replayed"]) == (200, "true")
        assert len(self.talk.committed()) == count

    def failure(self) -> None:
        fault = self._rng.choice(sorted(FAILURES))
        sent = [*self._history(), user(self._text())]
        if self._rng.random() < 0.5:
            sent = [*self.talk.messages[: self._starts[-1]]]
        before = self.talk.state()["records"]
        response = self.talk.chat(sent, tools=self._tools, sim={"fault": fault})
        assert response.status_code == FAILURES[fault], response.text
        assert self.talk.state()["records"] == before
        self._last = None

    def other_tools(self) -> None:
        self._tools = None if self._tools else [WEATHER]
        self.turn()

    def _ask(self, messages: list[Message]) -> None:
        fields = {
            "tools": self._tools,
            "sim": {
                "tool_calls": self._rng.random() < 0.4,
                "reasoning": self._rng.random() < 0.5,
                "finish_reason": self._rng.choice([None, None, None, "length", "abort"]),
                "completion_tokens": self._rng.choice([None, 1, 3, 90]),
            },
        }
        headers = {"idempotency-key": f"{self._rng.random()}"}
        response = self.talk.chat(messages, headers=headers, **fields)
        assert response.status_code == 200, response.text
        self._last = ({"messages": messages, **fields}, headers)
        self._starts.append(len(messages))
        self.talk.messages = [*messages, response.json()["choices"][0]["message"]]

    def _history(self) -> list[Message]:
        """As a harness sends it back."""
        if self._rng.random() < 0.5:
            return list(self.talk.messages)
        return [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            for message in self.talk.messages
        ]

    def _new(self) -> list[Message]:
        calls = self.talk.messages[-1].get("tool_calls") if self.talk.messages else None
        if calls:
            return [{"role": "tool", "tool_call_id": call["id"], "content": self._text()} for call in calls]
        if self._rng.random() < 0.2:
            return [user(self._text()), {"role": "assistant", "content": self._text()}, user(self._text())]
        return [user(self._text())]

    def _text(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 4)))


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.untimed) for seed in range(3, 6))])
def test_whatever_happens_the_tokens_are_exact(walked: Stand, seed: int) -> None:
    assert walked.sim.post("/sim/reset").status_code == 200
    walk = Walk(walked, seed)
    steps: list[str] = []
    for number in range(STEPS):
        if number == STEPS // 2 and seed % 2:
            walked.server.kill()
            walked.server.start()
        steps.append(walk.step())
        require_consistent(walked, walk.talk)
        if number % 10 == 9:
            require_sound(walked)
    assert set(steps) >= {"turn", "rollback", "failure"}, steps
