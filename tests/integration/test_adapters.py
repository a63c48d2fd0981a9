"""Which adapter an engine is asked for, and that records and rows say the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.interrupting import interrupted
from integration.places import Places
from integration.stand import Stand, error_of, standing
from integration.writing import Writing

LOADED = ("--adapters", "math,code")
"""Any other adapter, and in vLLM any other model, is refused by the engine."""

KINDS = {"sglang": ("sglang", "sglang"), "vllm-auto": ("vllm", "auto")}


@pytest.fixture(scope="module", params=KINDS)
def adapted(request: pytest.FixtureRequest, places: Places) -> Iterator[Stand]:
    """A server that knows the adapter `code`, before each engine, told its dialect or not."""
    engine, dialect = KINDS[request.param]
    arguments = ("--seed", "13", "--dialect", engine, *LOADED)
    environment = {"TURNLOG_UPSTREAM_DIALECT": dialect, "TURNLOG_ON_ABORT": "continue"}
    with standing(places.new("adapted"), *arguments, environment=environment) as made:
        assert made.http.post("/adapters/code/resume").status_code == 200
        yield made


def is_vllm(stand: Stand) -> bool:
    return stand.sim.get("/v1/models").json()["data"][0]["owned_by"] == "vllm"


def test_a_sessions_adapter_generates_its_turns_and_rows_say_so(adapted: Stand) -> None:
    talk = adapted.talk(adapter="math")
    for text in ("One", "Two"):
        talk.say(text)
    asked = adapted.engine_requests(talk.id)
    assert [one["adapter"] for one in asked] == ["math", "math"]
    assert [record["request"] for record in talk.state()["records"]] == [one["body"] for one in asked]
    # The first turn may have been sent before it was known what the engine speaks; by then it is.
    last = asked[-1]["body"]
    assert (last["model"], last.get("lora_path")) == (("math", None) if is_vllm(adapted) else ("simulator", "math"))
    [row] = talk.rows()
    assert (row["adapter"], [turn["adapter"] for turn in row["turns"]]) == ("math", ["math", "math"])


def test_a_completion_that_goes_on_after_an_abort_keeps_its_adapter(adapted: Stand) -> None:
    writing = Writing(adapted, adapter="math")
    asked = {"prompt": "Once upon a time", "max_tokens": 16, "sim": {"completion_tokens": 9, "reasoning": False}}
    assert interrupted(adapted, writing, [4], path=writing.url, **asked).status_code == 200
    seen = adapted.engine_requests(writing.id, "/v1/completions")
    assert [one["adapter"] for one in seen] == ["math", "math"]
    assert [part[1:] for part in writing.committed()[0]["parts"]] == [[0, 4], [4, 9]]


SERVED: tuple[tuple[str | None, dict[str, Any], str | None], ...] = (
    *((None, {}, None), (None, {"lora_path": None}, None), (None, {"lora_path": "math"}, "math")),
    *((None, {"lora_path": "math", "model": "code"}, "math"), (None, {"model": "code"}, "code")),
    *((None, {"lora_path": "", "model": "code"}, "code"), ("math", {"lora_path": "math"}, "math")),
    *(("math", {"model": name}, "math") for name in ("math", "anything", "simulator:unheard-of")),
    *(("math", {"lora_path": ""}, "math"), ("code", {"model": "code", "lora_path": "code"}, "code")),
)
"""The session's adapter, what a request names, and which the engine serves."""


def test_the_adapter_of_a_turn_is_what_the_engine_serves(adapted: Stand) -> None:
    for own, fields, served in SERVED:
        talk = adapted.talk(adapter=own)
        talk.say("One", **fields)
        [asked] = adapted.engine_requests(talk.id)
        [row] = talk.rows()
        assert [asked["adapter"], row["adapter"], row["turns"][0]["adapter"]] == [served] * 3, (own, fields)
        assert [record["request"] for record in talk.state()["records"]] == [asked["body"]]


def test_another_adapter_than_the_sessions_is_refused(adapted: Stand) -> None:
    talk = adapted.talk(adapter="math")
    wishes: tuple[dict[str, Any], ...] = (
        *({"lora_path": name} for name in ("code", "unheard-of", ["math"])),
        *({"model": "code"}, {"model": "simulator:code"}, {"lora_path": "math", "model": "code"}),
    )
    for fields in wishes:
        assert error_of(talk.chat([{"role": "user", "content": "One"}], **fields)) == (400, "invalid_request")
    assert (adapted.engine_requests(talk.id), talk.types()) == ([], ["SessionCreated"])
