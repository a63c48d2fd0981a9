"""Weights that are updated behind a pause at a real engine: versions in the rows, and what was cut goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.stand import Stand, Talk, until
from integration.tito import checked

from ops.engine.process import SERVED_AS, EngineProcess
from tests.tools.real_engine import weather
from tests.tools.real_engine.models import rescored

pytestmark = pytest.mark.real_engine

PATIENCE_S = 120.0
LONG = 300
"""Tokens of a generation that is still running when it is interrupted."""

NEAR = 1e-4
FLEET = ("/fleet/pause", "/fleet/resume")
ADAPTER = (f"/adapters/{SERVED_AS}/pause", f"/adapters/{SERVED_AS}/resume")
"""The base model under its own name: its generations are aborted one by one, by their request ids."""


@pytest.fixture
def continuing(engine: EngineProcess, model: Path, tmp_path: Path) -> Iterator[Stand]:
    environment = {"TURNLOG_TOKENIZER": str(model), "TURNLOG_ON_ABORT": "continue"}
    with checked(tmp_path, engine.base_url, environment=environment) as stand:
        until(lambda: stand.http.get("/engines").json()["engines"][0]["weight_version"] is not None, PATIENCE_S)
        yield stand


def updated(engine: EngineProcess, version: str) -> None:
    response = httpx.post(engine.base_url + "/update_weight_version", json={"new_version": version})
    assert response.status_code == 200, response.text


def is_generating(engine: EngineProcess) -> bool:
    lines = httpx.get(engine.base_url + "/metrics").text.splitlines()
    return any(line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in lines)


def ordered(stand: Stand, path: str) -> dict[str, Any]:
    response = stand.http.post(path)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def asked(stand: Stand, talk: Talk, route: str, **fields: Any) -> httpx.Response:
    """A turn of the session by this route."""
    if route == "chat":
        return talk.chat([weather.question("Oslo")], model=SERVED_AS, **fields)
    return stand.http.post(f"{talk.path}/v1/completions", json={"model": SERVED_AS, "prompt": "The weather", **fields})


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize(("pause", "resume"), [FLEET, ADAPTER], ids=["fleet", "adapter"])
def test_an_update_in_the_middle_of_a_turn(
    continuing: Stand, engine: EngineProcess, model: Path, route: str, pause: str, resume: str
) -> None:
    updated(engine, "1")
    for path in FLEET:
        ordered(continuing, path)
    talk = continuing.talk(adapter=SERVED_AS)
    turn = continuing.meanwhile(asked, continuing, talk, route, max_tokens=LONG, ignore_eos=True)
    until(lambda: is_generating(engine), PATIENCE_S)
    ordered(continuing, pause)
    until(lambda: not is_generating(engine), PATIENCE_S)
    updated(engine, "2")
    for path in FLEET:
        ordered(continuing, path)
    ordered(continuing, resume)
    response = turn.result(timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    [committed] = talk.committed()
    first, second = committed["weight_versions"]
    assert (committed["dispatched"], committed["output_tokens"]) == ("1", LONG)
    assert [first["version"], second["version"]] == ["1", "2"]
    assert 0 < first["end"] == second["start"] < second["end"] == LONG
    [row] = talk.rows()
    sampled = [version for version in row["weight_versions"] if version >= 0]
    assert sampled == [1] * first["end"] + [2] * (LONG - first["end"])
    scored = rescored(model, [row])
    assert (scored.tokens, scored.largest < NEAR) == (LONG, True), scored
