"""Rows of a real engine name the distribution that their logprobs are of: scored again in it, they are equal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from integration.stand import serving, until

from ops.engine.process import SERVED_AS, EngineProcess
from tests.tools.real_engine import weather
from tests.tools.real_engine.models import rescored

pytestmark = pytest.mark.real_engine

CLOSE = 1e-4
SAYS_S = 120.0
"""Time for vLLM's first `/server_info`."""


@pytest.mark.parametrize(("mode", "of"), [("raw_logprobs", "raw"), ("processed_logprobs", "processed")])
def test_at_another_temperature_the_logprobs_are_those_that_the_row_names(
    mode: str, of: str, model: Path, tmp_path: Path
) -> None:
    with (
        EngineProcess(model, tmp_path, "--logprobs-mode", mode) as engine,
        serving(tmp_path / "server", engine.base_url) as stand,
    ):
        until(lambda: stand.http.get("/engines").json()["engines"][0]["logprobs_of"] == of, SAYS_S)
        rows = []
        for number in range(4):
            talk = stand.talk()
            cut = {"top_k": 5} if number % 2 else {}
            asked = weather.question(weather.CITIES[number])
            talk.say(asked["content"], model=SERVED_AS, max_tokens=40, temperature=0.3, seed=number, **cut)
            rows += talk.rows()
        assert [turn["logprobs_of"] for row in rows for turn in row["sampling"]] == [of] * 4
        scored = rescored(model, rows)
        other = "raw" if of == "processed" else "processed"
        renamed = [{**row, "sampling": [{**turn, "logprobs_of": other} for turn in row["sampling"]]} for row in rows]
        wrong = rescored(model, renamed)
        print(f"{mode}: {msgspec.json.encode(scored).decode()}; as {other}: {wrong.largest:.3f}")
        assert scored.tokens > 0
        assert scored.largest < CLOSE
        assert wrong.largest > 100 * CLOSE, "the two cannot be told apart"
