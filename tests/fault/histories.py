"""An agent that knows what each of its sessions was after every act, and tells whether an export's row can be true."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from integration.stand import user

from fault.agents import Agent

LONGEST = 5
"""Live turns of a session before it is closed."""

ASKED = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True}
"""What an author has to ask for in order to know its turns' tokens."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A committed turn as its client knows it: the prompt's ids, the output's, its logprobs, and all messages then."""

    number: int
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    messages: list[Row]


@dataclass(frozen=True)
class State:
    """A session after an act that was begun at `asked` and acknowledged at `told` (monotonic seconds)."""

    asked: float
    told: float
    live: tuple[Turn, ...] = ()
    reward: float | None = None
    closed: bool = False
    erased: bool = False

    def is_in(self, row: Row) -> bool:
        numbers = [turn.number for turn in self.live]
        said = ([span["turn"] for span in row["turns"]], row["reward"], row["final"])
        return said == (numbers, self.reward, self.closed)

    def check(self, row: Row) -> None:
        """Tokens, masks and logprobs line up, and are what the clients were told."""
        last = self.live[-1]
        assert row["tokens"] == last.prompt + last.output
        mask, logprobs = [0] * len(row["tokens"]), [0.0] * len(row["tokens"])
        for turn, span in zip(self.live, row["turns"], strict=True):
            assert row["tokens"][span["output_start"] : span["end"]] == turn.output
            mask[span["output_start"] : span["end"]] = [1] * len(turn.output)
            logprobs[span["output_start"] : span["end"]] = turn.logprobs
        assert (row["loss_mask"], row["logprobs"]) == (mask, logprobs)
        assert row["messages"] == last.messages


class Author(Agent):
    """Takes turns, rolls back, rewards, closes and erases, one act after the other."""

    def __init__(self, urls: Sequence[str], name: str, seed: int) -> None:
        super().__init__(urls, name, seed)
        self.states: dict[str, list[State]] = {}

    def act(self) -> None:
        asked = time.monotonic()
        if not self.session_id or self._now.closed:
            self.begin(rollback_window=1)
            self.states[self.session_id] = [State(asked, time.monotonic())]
            return
        live = self._now.live
        chance = self.rng.random()
        if len(live) < LONGEST and (chance < 0.6 or not live):
            self._turn(asked, live)
        elif chance < 0.75:
            self._turn(asked, live[:-1])
        elif chance < 0.9:
            self.reward(reward := self.rng.randrange(100) / 100)
            self._became(asked, reward=reward)
        else:
            self.end()
            self._became(asked, closed=True)
            if chance > 0.97:
                self._became(time.monotonic(), erased=True)
                self.insist("DELETE", f"/sessions/{self.session_id}?erase=true")

    @property
    def _now(self) -> State:
        return self.states[self.session_id][-1]

    def _turn(self, asked: float, kept: tuple[Turn, ...]) -> None:
        """A turn behind these: with fewer than are live, the last one is rolled back.

        Where that was the first one, its input is sent once more: another would be another conversation.
        """
        self.messages = kept[-1].messages if kept else []
        again = self._now.live[0].messages[-2]["content"] if self._now.live and not kept else None
        said = again or f"{self.requests} {self.rng.random()}"
        sim = {"completion_tokens": self.rng.randrange(5, 40), "tool_calls": False, "reasoning": False}
        reply = self.say(said, sim=sim, **ASKED)
        choice = reply.json()["choices"][0]
        sampled = choice["meta_info"]["output_token_logprobs"]
        turn = Turn(
            number=int(reply.headers["x-turnlog-turn"]),
            prompt=choice["prompt_token_ids"],
            output=[one[1] for one in sampled],
            logprobs=[one[0] for one in sampled],
            messages=self.messages,
        )
        assert turn.messages[-2] == user(said)
        self._became(asked, live=(*kept, turn))

    def _became(self, asked: float, **changes: Any) -> None:
        self.states[self.session_id].append(replace(self._now, asked=asked, told=time.monotonic(), **changes))


def fitting(row: Row, states: Sequence[State], told: float, asked: float) -> bool:
    """Does the row show its session not older than it was known to be at `told`, nor in a state begun after `asked`?

    What it shows is checked then. False may mean that the session's author has not heard of that state yet.
    """
    known = max((place for place, state in enumerate(states) if state.told <= told), default=0)
    possible = [state for state in states[known:] if state.asked <= asked and state.is_in(row)]
    for state in possible[-1:]:
        state.check(row)
    return bool(possible)
