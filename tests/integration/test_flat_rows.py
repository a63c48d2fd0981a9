"""Replay payloads where no setting tells the shape of a row: stored, shared, read and exported flat."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from app.settings import FLAT_ROWS_WARNING
from integration.places import Places
from integration.routing import EXPERTS, POSITIONS, Recorded, Rows, Session, fetched, problems, recorded, rows_in
from integration.stand import serving
from ops.simulator.process import SimulatorProcess

REPLAY = {"TURNLOG_REPLAY": "routed_experts,indexer_topk"}
ROW = {"sglang": (8,), "incremental": (8,), "vllm": (4, 2)}
"""Of the experts: a `.npy` file tells layers and k, base64 only how many ids there are."""


@pytest.fixture(scope="module", params=ROW)
def line(
    request: pytest.FixtureRequest, sglang: SimulatorProcess, vllm: SimulatorProcess, places: Places
) -> Iterator[tuple[Recorded, tuple[int, ...]]]:
    """A server that asks for payloads without a word on their shape, and what a row of experts is like."""
    engine = vllm if request.param == "vllm" else sglang
    environment = REPLAY | ({"TURNLOG_REPLAY_INCREMENTAL": "true"} if request.param == "incremental" else {})
    with recorded(places.new("flat"), engine.base_url, environment) as made:
        yield made, ROW[request.param]


def whole(line: Recorded, talk: Session, *texts: str) -> Rows:
    """The engine's rows of each turn, joined where it left out those that were known."""
    rows: Rows | None = None
    for text in texts:
        talk.say(text)
        count = sum(json.loads(line.sent)["usage"][name] for name in ("prompt_tokens", "completion_tokens")) - 1
        choice = json.loads(line.sent)["choices"][0]
        if "meta_info" in choice:
            found = np.frombuffer(base64.b64decode(choice["meta_info"][EXPERTS]), "<i4").reshape(-1, 8)
        else:
            found = rows_in(line.sent)
        rows = found if rows is None else np.concatenate([rows[: count - len(found)], found])
        assert len(rows) == count
    assert rows is not None
    return rows


def test_flat_rows_are_in_samples_and_exports(line: tuple[Recorded, tuple[int, ...]]) -> None:
    server, row = line
    talk = server.talk()
    rows = whole(server, talk, "One", "Two", "Three")
    shape = [len(rows), *row]
    found = fetched(talk, 3)
    assert (found.start, found.shape) == (0, shape)
    assert np.array_equal(found.rows, rows)

    tensors = safetensors.numpy.load(server.stand.http.post(f"{talk.path}/samples", json={}).content)
    meta = json.loads(tensors["_samples_meta"].tobytes())["samples"][0]
    assert "routed_experts_missing" not in meta["metadata"]["turnlog"]
    assert np.array_equal(tensors["rollout_routed_experts.0"], rows.reshape(shape))
    if POSITIONS.encode() in server.sent:
        assert tensors["rollout_indexer_topk.0"].shape == (len(rows), 16)

    [exported] = talk.rows(replay="true")
    assert (exported["row_start"], exported["rows"], exported["shape"]) == (0, len(rows), shape)
    data = np.frombuffer(base64.b64decode(exported[EXPERTS]), exported["dtype"])
    assert np.array_equal(data.reshape(shape), rows.reshape(shape))
    [shaped] = talk.rows(replay="true", shape="slime")
    assert shaped["rollout_routed_experts"] == rows.reshape(shape).tolist()
    query = {"session_id": talk.id, "replay": "true", "shape": "slime", "format": "parquet"}
    table = pq.read_table(io.BytesIO(server.stand.http.get("/export", params=query).content)).to_pylist()
    # A column has one type: flat rows have one layer there.
    assert np.array_equal(
        table[0]["rollout_routed_experts"], rows.reshape(len(rows), *(row if len(row) == 2 else (1, 8)))
    )
    assert problems(server.stand) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        (REPLAY, True),
        ({**REPLAY, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}, False),
        ({**REPLAY, "TURNLOG_UPSTREAM_DIALECT": "vllm"}, False),
    ],
)
def test_a_server_says_that_rows_will_be_flat(
    environment: dict[str, str], warned: bool, sglang: SimulatorProcess, places: Places
) -> None:
    with serving(places.new("warned"), sglang.base_url, environment=environment) as made:
        assert made.http.get("/ready").json()["warnings"] == ([FLAT_ROWS_WARNING] if warned else [])
        assert made.server.log_path.read_text().count(FLAT_ROWS_WARNING) == warned
