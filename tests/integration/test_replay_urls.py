"""`replay=urls`: a reader fetches replay payloads from the bucket itself, and gets what `replay=true` gives."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.buckets import TestBucket

from integration.places import Places
from integration.routing import BOTH, KINDS
from integration.stand import Stand, serving
from ops.simulator.process import SimulatorProcess
from turnlog import NotTurnlog, Turnlog, Unreachable, fetch_payload


@pytest.fixture(scope="module")
def bucket() -> Iterator[TestBucket]:
    made = TestBucket()
    yield made
    made.close()


@pytest.fixture(scope="module")
def stand(sglang: SimulatorProcess, places: Places, bucket: TestBucket) -> Iterator[Stand]:
    environment = {**BOTH, **bucket.environment, "TURNLOG_CLOSED_REPLAY_TTL_S": "off"}
    with serving(places.new("urls"), sglang.base_url, environment=environment) as made:
        yield made


LARGE: dict[str, Any] = {"experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1}}
"""Rows that are objects: nothing makes them small."""


def given(row: dict[str, Any], kind: str) -> tuple[bytes, list[int]]:
    """A payload that a row has in full, and its shape."""
    fields = row if kind == "routed_experts" else row[kind]
    data = fields["routed_experts" if kind == "routed_experts" else "data"]
    return base64.b64decode(data), fields["shape"]


def test_the_same_rows(stand: Stand) -> None:
    talk = stand.talk()
    for text in ("Hello", "And then?", "Once more"):
        talk.say(text, sim=LARGE)
    [whole] = talk.rows(replay="true")
    with Turnlog(stand.base_url) as client, httpx.Client() as http:
        [row] = client.export(session_id=talk.id, replay="urls", url_s=60)
        assert "routed_experts" not in row
        assert set(row["replay_urls"]) == set(KINDS)
        for kind in KINDS:
            links = row["replay_urls"][kind]
            assert kind != "routed_experts" or all("url" in chunk for chunk in links["chunks"])
            found = fetch_payload(links, http)
            assert (found.tobytes(), list(found.shape)) == given(whole, kind)
            assert np.array_equal(found, fetch_payload(links))


def test_wrong_bytes_are_not_given(stand: Stand) -> None:
    talks = [stand.talk(), stand.talk()]
    with Turnlog(stand.base_url) as client:
        for number, talk in enumerate(talks):
            talk.say(
                "Hello", sim={"experts": {**LARGE["experts"], "experts": 2**31 - 1 - number}}
            )  # other ids for sure
        found = [next(iter(client.export(session_id=talk.id, replay="urls"))) for talk in talks]
    links, others = (row["replay_urls"]["routed_experts"] for row in found)
    other = others["chunks"][0]["url"]
    [chunk] = links["chunks"]
    assert fetch_payload(links).shape == tuple(links["shape"])
    for change, error in (
        ({"hash": "0" * 32}, NotTurnlog),
        ({"url": other}, NotTurnlog),
        ({"url": chunk["url"].replace("/run/", "/gone/")}, Unreachable),
        ({"url": "http://127.0.0.1:9/"}, Unreachable),
    ):
        with pytest.raises(error):
            fetch_payload({**links, "chunks": [{**chunk, **change}]})


def test_what_has_no_place_for_them_and_a_server_without_a_bucket(stand: Stand, shared: Stand) -> None:
    for where, parameters, named in (
        (stand, {"shape": "slime"}, "shape=turnlog"),
        (stand, {"format": "safetensors"}, "ndjson, msgpack, parquet"),
        *((stand, {"url_s": seconds}, "url_s") for seconds in (0, 8 * 86400)),
        (shared, {}, "TURNLOG_PAYLOADS"),
    ):
        response = where.http.get("/export", params={"replay": "urls", **parameters})
        assert (response.status_code, named in response.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"shape": "slime"}, "shape=turnlog"),
        ({"format": "safetensors"}, "ndjson, msgpack, parquet"),
        ({"url_s": 0}, "url_s"),
        ({"url_s": 8 * 86400}, "url_s"),
    ],
)
def test_what_has_no_place_for_them(stand: Stand, parameters: dict[str, Any], named: str) -> None:
    response = stand.http.get("/export", params={"replay": "urls", **parameters})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_only_a_bucket_has_urls(shared: Stand) -> None:
    response = shared.http.get("/export", params={"replay": "urls"})
    assert response.status_code == 400
    assert "TURNLOG_PAYLOADS" in response.json()["error"]["message"]
