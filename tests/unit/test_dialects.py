"""What an engine is asked for, whatever the client wished."""

from __future__ import annotations

import json

import msgspec
import pytest

from app.upstream.dialects import (
    DialectChoice,
    asked_for,
    clients_first_row,
    complete,
    for_adapter,
    from_row,
    takes_rid,
)

DIALECTS: tuple[DialectChoice, ...] = ("auto", "sglang", "vllm")
BOTH = ["routed_experts", "indexer_topk"]


def params(**fields: str) -> dict[str, msgspec.Raw]:
    """Parameters as raw JSON."""
    return {name: msgspec.Raw(text.encode()) for name, text in fields.items()}


WISHES = params(
    model='"m"', logprobs="false", top_logprobs="null", return_meta_info="false", return_prompt_token_ids="null"
) | params(return_token_ids="false", temperature="0.70")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_needed_overrides_the_clients_wish(dialect: DialectChoice) -> None:
    asked, vllm = complete(WISHES, dialect), dialect == "vllm"
    assert {name: bytes(asked[name]) for name in WISHES} == {
        "model": b'"m"',
        "temperature": b"0.70",
        "logprobs": b"true",
        "top_logprobs": b"null" if dialect == "sglang" else b"0",
        "return_meta_info": b"false" if vllm else b"true",
        "return_prompt_token_ids": b"null" if vllm else b"true",
        "return_token_ids": b"false" if dialect == "sglang" else b"true",
    }
    assert not [name for name in complete({}, dialect) if "experts" in name or "indexer" in name]


def test_what_only_one_dialect_knows_is_asked_in_its_own_way() -> None:
    assert complete(params(top_logprobs="3"), "auto")["top_logprobs"] == b"3"
    assert [complete({}, dialect).get("top_logprobs") for dialect in DIALECTS[1:]] == [None, b"0"]
    asked = params(logprob_start_len="4")
    assert [complete(asked, dialect).get("prompt_logprobs") for dialect in DIALECTS] == [b"0", None, b"0"]
    assert [takes_rid(dialect) for dialect in DIALECTS] == [True, True, False]


@pytest.mark.parametrize(
    ("dialect", "model", "asked"),
    [
        ("sglang", '"m"', {"model": b'"m"', "lora_path": b'"math"'}),
        ("sglang", '"m:other"', {"model": b'"m"', "lora_path": b'"math"'}),
        ("sglang", '"m\\u003aother"', {"model": b'"m"', "lora_path": b'"math"'}),
        ("sglang", '{"a":1}', {"model": b'{"a":1}', "lora_path": b'"math"'}),
        ("sglang", None, {"lora_path": b'"math"'}),
        ("vllm", '"m"', {"model": b'"math"'}),
        ("vllm", None, {"model": b'"math"'}),
        ("auto", '"m:other"', {"model": b'"math"', "lora_path": b'"math"'}),
    ],
)
def test_an_adapter_is_asked_for_in_the_engines_own_way(
    dialect: DialectChoice, model: str | None, asked: dict[str, bytes]
) -> None:
    fields = {"lora_path": b'"math"', "seed": b"1"} | ({} if model is None else {"model": model.encode()})
    assert for_adapter(fields, "math", dialect) == {**asked, "seed": b"1"}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("clients", ["false", "null", "true", "7"])
def test_payloads_that_are_wanted_override_the_clients_wish(dialect: DialectChoice, clients: str) -> None:
    """Which rows is Turnlog's own to say. vLLM is not asked for what it does not have."""
    given = params(return_routed_experts=clients, return_indexer_topk=clients)
    rows = params(routed_experts_start_len="5", routed_experts_prompt_start="5")
    asked = complete({**given, **rows}, dialect, BOTH)
    assert asked["return_routed_experts"] == b"true"
    assert asked["return_indexer_topk"] == (clients.encode() if dialect == "vllm" else b"true")
    assert not rows.keys() & asked.keys()
    for replay in ([], ["indexer_topk"]):
        kept = complete(rows, dialect, replay)
        assert [bytes(kept[name]) for name in rows] == [b"5", b"5"]
    other = complete({}, dialect, ["indexer_topk"])
    assert ("return_routed_experts" in other, "return_indexer_topk" in other) == (False, dialect != "vllm")


def test_what_the_client_asked_for() -> None:
    assert asked_for(params(return_routed_experts="true")) == {"routed_experts"}
    assert asked_for(params(return_indexer_topk="true", return_routed_experts="false")) == {"indexer_topk"}
    for text in ("false", "null", "1", '"true"', "{}"):
        assert asked_for(params(return_routed_experts=text)) == asked_for({}) == frozenset()
    for name in ("routed_experts_start_len", "routed_experts_prompt_start"):
        for text, row in (("0", 0), ("12", 12), *((bad, 0) for bad in ("null", "-1", "1.5", '"7"', "true", "[3]"))):
            assert clients_first_row(params(**{name: text})) == row
        assert clients_first_row(params(**{name: "9" * 30})) == clients_first_row({}) == 0


@pytest.mark.parametrize(
    ("dialect", "names"),
    [("auto", ["start_len", "prompt_start"]), ("sglang", ["start_len"]), ("vllm", ["prompt_start"])],
)
def test_rows_are_asked_for_under_the_dialects_own_name(dialect: DialectChoice, names: list[str]) -> None:
    body = b'{"a":1' + from_row(42, dialect) + b"}"
    assert json.loads(body) == {"a": 1, **{f"routed_experts_{name}": 42 for name in names}}
