"""Rows of the decode: `retain: sampled` and `routing=sampled`, before an engine that routes a prompt anew each turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from integration.places import Places
from integration.routing import (
    EXPERTS,
    Rows,
    Session,
    own_rows,
    payload_rows,
    problems,
    rows_in,
    session_of,
)
from integration.stand import Stand, error_of, user
from integration.tito import checked
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

ROW_BYTES = 8
WINDOW = 1


@pytest.fixture(scope="module")
def line(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    environment = {"TURNLOG_REPLAY": EXPERTS, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    with checked(places.new("sampled"), sglang.base_url, environment=environment) as made:
        yield made


class Player:
    """Takes turns at random places, and keeps what the engine gave of each."""

    def __init__(self, stand: Stand, seed: int, **body: Any) -> None:
        self.draw = random.Random(seed)
        self.talk: Session = session_of(stand, rollback_window=WINDOW, **body)
        self.given: dict[int, Rows] = {}
        self.live: list[int] = []

    def turn(self, keep: int | None = None) -> None:
        """The next turn, or one that goes on behind the first `keep` messages."""
        self.talk.messages = self.talk.messages[:keep]
        shift = len(self.given) + 1
        sim = {"completion_tokens": self.draw.randint(1, 12), "tool_calls": False, "experts": {"shift": shift}}
        reply = self.talk.add(user(f"{shift} " + "so " * self.draw.randint(1, 9)), sim=sim, return_routed_experts=True)
        self.given[int(reply.headers["x-turnlog-turn"])] = rows_in(reply.content)
        self.live.append(self.live_bytes())

    def linear(self, turns: int) -> None:
        for _ in range(turns):
            back = self.draw.random() < 0.3 and len(self.talk.messages) >= 2 * WINDOW + 2
            self.turn(len(self.talk.messages) - 2 * WINDOW if back else None)

    def tree(self, turns: int) -> None:
        histories: list[list[Any]] = [[]]
        for _ in range(turns):
            self.talk.messages = list(self.draw.choice(histories[-3:] if self.draw.random() < 0.7 else histories))
            self.turn()
            histories.append(self.talk.messages)

    def live_bytes(self) -> int:
        """Of the chunks that are stored now, by the log."""
        sizes: dict[tuple[int, int], int] = {}
        for event in self.talk.events():
            for payload in event.get("payloads", ()):
                sizes |= {(chunk[0], chunk[1]): chunk[5] for chunk in payload["chunks"]}
            for key in event.get("freed", ()):
                del sizes[tuple(key)]
        return sum(sizes.values())

    def rows(self, routing: str) -> list[dict[str, Any]]:
        return self.talk.rows(replay="true", routing=routing, explain="true")


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize("seed", range(3))
def test_sampled_rows_are_those_of_the_decode(line: Stand, history: str, seed: int) -> None:
    player = Player(line, seed, history=history, retain="sampled")
    getattr(player, history)(14)
    rows = [row for row in player.rows("sampled") if row.get("excluded") is None]
    newest = [row for row in player.rows("newest") if row.get("excluded") is None]
    assert len(rows) == len(newest) > 0
    for row, other in zip(rows, newest, strict=True):
        assert "routing" not in other
        assert np.array_equal(payload_rows(other), player.given[other["turns"][-1]["turn"]])
        assert np.array_equal(payload_rows(row), own_rows(row, player.given))
        differs = int((payload_rows(row) != payload_rows(other)).any(axis=1).sum())
        assert (row["routing"], row["routing_differs"]) == ("sampled", differs)
    assert any(row["routing_differs"] for row in rows)
    # Each token's own row once, and what the window has of each leaf.
    turns = {span["turn"]: span["end"] - span["start"] for row in rows for span in row["turns"]}
    whole = (WINDOW + 1) * sum(len(row["tokens"]) for row in rows)
    assert player.live[-1] <= ROW_BYTES * (sum(turns.values()) + whole)
    assert problems(line) == []


def test_a_row_that_needs_a_tombstoned_one_is_left_out(line: Stand) -> None:
    player = Player(line, 7, history="linear")
    for _ in range(WINDOW + 1):
        player.turn()
    [row] = player.rows("sampled")
    assert np.array_equal(payload_rows(row), own_rows(row, player.given))
    player.turn()
    [left_out] = player.rows("sampled")
    assert left_out["excluded"] == "tombstoned"
    assert len(player.rows("newest")) == 1


@pytest.mark.parametrize("replay", ["urls", "false"])
def test_what_has_no_sampled_rows_is_refused(line: Stand, replay: str) -> None:
    reply: httpx.Response = line.http.get("/export", params={"replay": replay, "routing": "sampled"})
    assert error_of(reply)[0] == 400
