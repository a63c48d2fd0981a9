"""Rows of the decode: `retain: sampled` and `routing=sampled`, before an engine that routes a prompt anew each turn."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from integration.places import Places
from integration.routing import (
    EXPERTS,
    Rows,
    Session,
    asks_for_all,
    is_of_the_decode,
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
LARGE = {"layers": 48, "top_k": 8, "experts": 2**31 - 1}
"""Experts whose chunks are objects, where there is a bucket."""


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


def taken_back(stand: Stand, talk: Session, folder: Path) -> str:
    """A restored checkpoint, behind which the window had moved on."""
    assert stand.http.post("/checkpoints", json={"name": talk.id}).status_code == 200
    for number in range(3, 6):
        talk.say("Later", **asks_for_all(number, **LARGE))
    assert stand.http.post(f"/checkpoints/{talk.id}/restore").status_code == 200
    assert stand.http.delete(f"/checkpoints/{talk.id}").status_code == 204
    return talk.id


def returned(stand: Stand, talk: Session, folder: Path) -> str:
    """From an archive."""
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    step = stand.http.post("/archives", json={"to": folder.as_uri(), "older_than_s": 0}).json()
    assert step["archived"] == 1
    assert stand.http.post("/archives/import", json={"file": step["file"]}).json()["imported"] == 1
    return talk.id


def forked(stand: Stand, talk: Session, folder: Path) -> str:
    reply = stand.http.post(f"{talk.path}/fork", json={"turn": 4, "parent_loss": True})
    found: str = reply.json()["sessions"][0]["session_id"]
    return found


@pytest.fixture(scope="module", params=["database", "objects"])
def kept(
    request: pytest.FixtureRequest, sglang: SimulatorProcess, places: Places, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    """A server whose payloads are in its database, or in a bucket."""
    environment = {"TURNLOG_PAYLOADS_KEEP_S": "0", "TURNLOG_FILE_ROOT": tempfile.gettempdir()}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "objects":
            environment["TURNLOG_PAYLOADS"] = tmp_path_factory.mktemp("bucket").as_uri()
            patch.setenv("TURNLOG_PAYLOADS", environment["TURNLOG_PAYLOADS"])  # for what checks the store
        with checked(places.new("retained"), sglang.base_url, environment=environment) as made:
            yield made


@pytest.mark.parametrize("done", [taken_back, returned, forked])
def test_what_else_a_session_can_do(kept: Stand, tmp_path: Path, done: Callable[[Stand, Session, Path], str]) -> None:
    """All three kinds stay those of the decode, and go on from there."""
    talk = session_of(kept, retain="sampled", rollback_window=0)
    replies = [talk.say(f"Turn {turn}", **asks_for_all(turn, **LARGE)) for turn in range(1, 5)]
    name = done(kept, talk, tmp_path)
    [row] = kept.rows(session_id=name, replay="true", routing="sampled")
    assert row["routing_differs"] > 0
    assert is_of_the_decode(row, replies)
    assert problems(kept) == []


@pytest.mark.parametrize("replay", ["urls", "false"])
def test_what_has_no_sampled_rows_is_refused(line: Stand, replay: str) -> None:
    reply: httpx.Response = line.http.get("/export", params={"replay": replay, "routing": "sampled"})
    assert error_of(reply)[0] == 400
