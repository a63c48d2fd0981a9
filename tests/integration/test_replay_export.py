"""Exported rows of replay payloads: those of the sample's tokens, whatever was tombstoned, cut or split."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from integration.places import Places
from integration.routing import BOTH, EXPERTS, KINDS, POSITIONS, Recorded, Rows, Session, recorded, rows_in
from integration.stand import WEATHER
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

Row = dict[str, Any]
SHAPES = {EXPERTS: (4, 2), POSITIONS: (16,)}
"""Of a row: base64 tells none, and only that of the experts is a setting."""


@pytest.fixture(scope="module", params=["inline", "pool", "patches"])
def line(request: pytest.FixtureRequest, sglang: SimulatorProcess, places: Places) -> Iterator[Recorded]:
    """Judged where it is, in the pool, or with new rows only."""
    environment = {**BOTH, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    environment |= {"TURNLOG_INLINE_MAX_BYTES": "0", "TURNLOG_WORKERS": "1"} if request.param == "pool" else {}
    environment |= {"TURNLOG_REPLAY_INCREMENTAL": "true"} if request.param == "patches" else {}
    with recorded(places.new("export"), sglang.base_url, environment) as made:
        yield made


def exported(talk: Session, **query: Any) -> list[Row]:
    return talk.rows(replay="true", **query)


def field(row: Row, kind: str) -> Row:
    """A kind's data and what goes with it; the experts' stand in the row itself."""
    if kind == EXPERTS:
        return {"data": row[EXPERTS], **{name: row[name] for name in ("row_start", "rows", "dtype", "shape")}}
    found: Row = row[kind]
    return found


def decoded(row: Row, kind: str = EXPERTS) -> Rows:
    """The exported rows, in step with their description."""
    one = field(row, kind)
    rows = np.frombuffer(base64.b64decode(one["data"]), np.dtype(one["dtype"]).newbyteorder("<")).reshape(one["shape"])
    assert one["rows"] == one["shape"][0]
    assert one["row_start"] + one["rows"] == len(row["tokens"]) - 1
    return rows.reshape(len(rows), -1)


def payloads(rows: list[Row]) -> list[list[Row]]:
    return [[field(row, kind) for kind in KINDS] for row in rows]


def shared_start(line: Recorded) -> None:
    """Generations of equal requests are equal from here on."""
    assert line.stand.sim.post("/sim/reset").status_code == 200


def twins(line: Recorded, texts: list[str], **body: Any) -> tuple[Session, Session]:
    """Two sessions with equal turns, one of which keeps every payload."""
    made = []
    for retain in ("window", "all"):
        shared_start(line)
        talk = line.talk(retain=retain, **body)
        for text in texts:
            talk.say(text)
        made.append(talk)
    return made[0], made[1]


def test_a_row_for_each_token_but_the_last(line: Recorded) -> None:
    talk = line.talk()
    for text in ("One", "Two", "Three"):
        talk.say(text, return_routed_experts=True)
    [row] = exported(talk)
    for kind in KINDS:
        rows = decoded(row, kind)
        assert field(row, kind)["shape"] == [len(row["tokens"]) - 1, *SHAPES[kind]]
        if kind == POSITIONS or first_row(line.sent, row) == 0:
            assert np.array_equal(rows, rows_in(line.sent, kind))
    sent = rows_sent(line.sent)
    assert np.array_equal(decoded(row)[-len(sent) :], sent)
    assert row["tombstoned"] == []


def rows_sent(body: bytes) -> Rows:
    raw = base64.b64decode(json.loads(body)["choices"][0]["meta_info"][EXPERTS])
    return np.frombuffer(raw, "<i4").reshape(-1, 8)


def first_row(body: bytes, row: Row) -> int:
    """The first row of experts that the engine sent."""
    return len(row["tokens"]) - 1 - len(rows_sent(body))


@pytest.mark.parametrize("window", [0, 1])
def test_tombstones_change_no_exported_row(line: Recorded, window: int) -> None:
    window_of, all_of = twins(line, ["One", "Two", "Three", "Four"], rollback_window=window)
    assert "BlobsTombstoned" in window_of.types()
    assert "BlobsTombstoned" not in all_of.types()
    first, second = exported(window_of), exported(all_of)
    assert first[0]["tokens"] == second[0]["tokens"]
    assert payloads(first) == payloads(second)


def test_a_cut_at_any_turn_gives_the_same_rows(line: Recorded) -> None:
    window_of, all_of = twins(line, ["One", "Two", "Three", "Four"])
    [whole] = exported(window_of)
    ends = [span["end"] for span in whole["turns"]]
    for end, turns in zip(ends, range(1, 5), strict=True):
        for length in (end, end + 1):
            [row] = exported(window_of, max_seq_len=length)
            assert (len(row["tokens"]), len(row["turns"])) == (end, turns)
            for kind in KINDS:
                assert np.array_equal(decoded(row, kind), decoded(whole, kind)[: end - 1])
            assert payloads([row]) == payloads(exported(all_of, max_seq_len=length))
    assert exported(window_of, max_seq_len=ends[0] - 1) == []


def two_segments(line: Recorded, retain: str) -> Session:
    """The second segment begins where tools change the prompt's beginning."""
    shared_start(line)
    talk = line.talk(retain=retain, rollback_window=0)
    for text in ("One", "Two", "Three"):
        talk.say(text)
    for text in ("Four", "Five", "Six"):
        talk.say(text, tools=[WEATHER], sim={"tool_calls": False}, return_routed_experts=True)
    return talk


def test_each_segment_has_its_own_rows(line: Recorded) -> None:
    kept, complete = two_segments(line, "window"), two_segments(line, "all")
    rows = exported(kept)
    assert [(row["segment"], len(row["turns"])) for row in rows] == [(0, 3), (1, 3)]
    for row in rows:
        for kind in KINDS:
            decoded(row, kind)
        assert row["tombstoned"] == []
    sent = rows_sent(line.sent)
    assert np.array_equal(decoded(rows[1])[-len(sent) :], sent)
    assert payloads(rows) == payloads(exported(complete))
    for length in (len(rows[0]["tokens"]), rows[1]["turns"][0]["end"], rows[1]["turns"][1]["end"]):
        assert payloads(exported(kept, max_seq_len=length)) == payloads(exported(complete, max_seq_len=length))


def test_the_same_cursor_gives_the_same_rows_unless_they_were_tombstoned(line: Recorded) -> None:
    """Chunks that the newest turn shares are still there; those of its own are gone, and the row says so."""
    talk = line.talk(rollback_window=0)
    talk.say("One")
    first = line.stand.http.get("/export", params={"session_id": talk.id, "replay": "true"})
    cursor = first.headers["x-turnlog-cursor"]
    talk.say("Two")
    again = line.stand.http.get("/export", params={"session_id": talk.id, "replay": "true", "cursor": cursor})
    was, row = json.loads(first.text), json.loads(again.text)
    assert row["tokens"] == was["tokens"]
    for kind in KINDS:
        gone = kind in row["tombstoned"]
        assert (field(row, kind)["data"] if not gone else None) == (None if gone else field(was, kind)["data"])
