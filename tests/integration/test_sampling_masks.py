"""Sampling masks from both engines: stored, given again, tombstoned, and exported in the trainers' own forms."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from integration.places import Places
from integration.routing import MASK, Session, Sets, fetch, problems, session_of, sets_in, sets_of, split
from integration.stand import Stand
from integration.tito import checked
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

ASKED: dict[str, Any] = {"top_k": 8, "top_p": 0.9, "return_sampling_mask": True}
PLAIN = {"tool_calls": False}


@pytest.fixture(scope="module", params=["sglang", "vllm", "pool"])
def line(
    request: pytest.FixtureRequest, sglang: SimulatorProcess, vllm: SimulatorProcess, places: Places
) -> Iterator[Stand]:
    engine = vllm if request.param == "vllm" else sglang
    environment = {"TURNLOG_REPLAY": f"routed_experts,{MASK}"}
    environment |= {"TURNLOG_INLINE_MAX_BYTES": "0", "TURNLOG_WORKERS": "1"} if request.param == "pool" else {}
    with checked(places.new("masks"), engine.base_url, environment=environment) as made:
        yield made


def played(stand: Stand, **body: Any) -> tuple[Session, list[Sets]]:
    talk = session_of(stand, **body)
    replies = [talk.say(text, sim=PLAIN, **ASKED) for text in ("One", "Two", "Three")]
    return talk, [sets_in(reply.content) for reply in replies]


def expected(row: Any, given: list[Sets]) -> Sets:
    """For each token of a row the ids that it was drawn from."""
    found: Sets = [[] for _ in row["tokens"]]
    for span, sets in zip(row["turns"], given, strict=True):
        found[span["output_start"] : span["end"]] = sets
    return found


def test_each_token_has_the_ids_that_it_was_drawn_from(line: Stand) -> None:
    talk, given = played(line)
    assert line.http.put(f"{talk.path}/reward", json={"reward": 1.0}).status_code == 200
    [row] = talk.rows(replay="true")
    wanted = expected(row, given)
    assert all(token in ids for token, ids in zip(row["tokens"], wanted, strict=True) if ids)
    assert sets_of(row) == wanted[1:]
    [told] = talk.rows()
    modes = {turn["logprobs_of"] for turn in told["sampling"]}
    assert modes == ({"processed"} if row["provenance"]["dialects"] == ["sglang"] else {"unknown"})

    found = fetch(talk, 3, MASK)
    count = len(wanted)
    offsets = np.frombuffer(found.content, "<i8", count)
    assert (
        split(np.frombuffer(found.content, found.headers["x-turnlog-dtype"], offset=8 * count), offsets) == wanted[1:]
    )
    assert [fetch(talk, turn, MASK).status_code for turn in (1, 2)] == [410, 200]

    start = row["prompt_length"]
    [slime] = talk.rows(replay="true", shape="slime")
    assert split(slime["rollout_top_p_token_ids"], slime["rollout_top_p_token_offsets"]) == wanted[start:]
    [miles] = talk.rows(replay="true", shape="miles")
    single = [ids or [token] for token, ids in zip(row["tokens"][start:], wanted[start:], strict=True)]
    mask = miles["rollout_sampling_mask"]
    assert split(mask["ids"], mask["offsets"]) == single
    [skyrl] = talk.rows(replay="true", shape="skyrl")
    support = skyrl["rollout_sample_support"]
    assert split(support["ids"], support["offsets"]) == wanted[start:]
    [prime] = talk.rows(replay="true", shape="prime-rl")
    ids, counts = (np.frombuffer(base64.b64decode(prime[MASK][name]), "<i4") for name in ("ids", "counts"))
    assert split(ids, np.append(0, np.cumsum(counts))) == wanted
    tensors = safetensors.numpy.load(line.http.post(f"{talk.path}/samples", json={}).content)
    ids, offsets = (tensors[f"rollout_sampling_mask.{name}.0"] for name in ("ids", "offsets"))
    assert (ids.dtype, offsets.dtype, split(ids, offsets)) == (np.int32, np.int64, single)
    for shape in ("turnlog", "slime", "miles", "skyrl", "prime-rl"):
        query = {"session_id": talk.id, "replay": "true", "shape": shape, "format": "parquet"}
        assert pq.read_table(io.BytesIO(line.http.get("/export", params=query).content)).num_rows == 1
    assert problems(line) == []


def test_what_is_cut_and_what_is_gone_is_said(line: Stand) -> None:
    talk, given = played(line, rollback_window=0)
    [whole] = talk.rows(replay="true")
    length = whole["turns"][1]["end"]
    [row] = talk.rows(replay="true", max_seq_len=str(length))
    assert sets_of(row) == expected(whole, given)[1:length]
    state = line.get(talk.path)["records"]
    assert [sets_in(json.dumps(record["response"]).encode()) is None for record in state] == [True, True, False]
