"""The simulator's replies beside those recorded of SGLang 0.5.23.

`recorded_sglang.jsonl` was recorded of the published server over a scripted scheduler: of a reply the names in their
order and the kinds of their values, of an error and of what is no JSON the text. An abort in the waiting queue has the
`weight_versions` that SGLang's own scheduler puts into it, and the scripted one does not. Each request has the `sim`
that orders what the scheduler's script said.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from ops.simulator.app import Simulator
from ops.simulator.wire import Config

pytestmark = pytest.mark.anyio


RECORDED = [json.loads(line) for line in Path(__file__).with_name("recorded_sglang.jsonl").read_text().splitlines()]
KINDS = {str: "", int: "#", float: "#", bool: "?", type(None): "-"}


def shape(value: Any) -> str:
    """The names of a value in their order, and the kinds of their values; of a list its first object's."""
    if isinstance(value, dict):
        return "{" + " ".join(name + shape(one) for name, one in value.items()) + "}"
    if isinstance(value, list):
        has_fields = value and isinstance(value[0], dict) and "token" not in value[0]
        return "[" + (shape(value[0]) if has_fields else "") + "]"
    return KINDS[type(value)]


def shown(response: httpx.Response) -> Any:
    """What the recording has of a reply: of a stream each shape once while it repeats."""
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        return [name for name, _ in groupby(shape(json.loads(event)) for event in events)]
    if not kind:
        return response.text
    value = response.json()
    return value if response.status_code >= 400 or not isinstance(value, dict) else shape(value)


@pytest.mark.parametrize("recorded", RECORDED, ids=[one["name"] for one in RECORDED])
async def test_replies_are_those_that_were_recorded(recorded: dict[str, Any]) -> None:
    transport = httpx.ASGITransport(app=Simulator(Config(context_length=32768)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        response = await client.request(recorded["method"], recorded["path"], json=recorded["body"])
    assert (response.status_code, shown(response)) == (recorded["status"], recorded["says"])
