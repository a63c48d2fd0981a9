"""Rows say which distribution their logprobs are of, and how each turn was sampled."""

from __future__ import annotations

import pytest

from integration.places import Places
from integration.stand import Stand, serving, until
from ops.simulator.process import SimulatorProcess


def said(stand: Stand) -> str | None:
    found: str | None = stand.http.get("/engines").json()["engines"][0]["logprobs_of"]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "setting", "expected"),
    [
        pytest.param(["--dialect", "vllm", "--logprobs-mode", "processed_logprobs"], None, "processed", id="vllm says"),
        pytest.param(["--dialect", "vllm", "--logprobs-mode", "raw_logprobs"], "scaled", "raw", id="said before set"),
        pytest.param(["--dialect", "vllm"], "raw", "raw", id="vllm without dev mode"),
        pytest.param(["--dialect", "vllm"], None, None, id="nobody says"),
        pytest.param([], "scaled", "scaled", id="sglang"),
    ],
)
def test_what_the_logprobs_are_of(engine: list[str], setting: str | None, expected: str | None, places: Places) -> None:
    environment = {} if setting is None else {"TURNLOG_LOGPROBS_MODE": setting}
    with (
        SimulatorProcess(*engine) as upstream,
        serving(places.new("logprobs"), upstream.base_url, environment=environment) as stand,
    ):
        until(lambda: stand.http.get("/engines").json()["engines"][0]["health"] == "healthy")
        until(lambda: said(stand) == expected)
        talk = stand.talk()
        talk.say("Hello", temperature=0.3, top_k=20)
        talk.say("And then?", top_p=0.9, min_p=0)
        assert [event.get("logprobs_of") for event in talk.committed()] == [expected] * 2
        of = expected or "unknown"
        sampling = [
            {"turn": 1, "logprobs_of": of, "temperature": 0.3, "top_k": 20, "top_p": None, "min_p": None},
            {"turn": 2, "logprobs_of": of, "temperature": None, "top_k": None, "top_p": 0.9, "min_p": 0.0},
        ]
        [row] = talk.rows()
        assert row["sampling"] == sampling
        [slime] = talk.rows(shape="slime")
        assert slime["metadata"]["turnlog"]["sampling"] == sampling
