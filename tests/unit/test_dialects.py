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

WISHES = {
    name: msgspec.Raw(text)
    for name, text in {
        "model": b'"m"',
        "logprobs": b"false",
        "top_logprobs": b"null",
        "return_meta_info": b"false",
        "return_prompt_token_ids": b"null",
        "return_token_ids": b"false",
        "temperature": b"0.70",
    }.items()
}


@pytest.mark.parametrize("dialect", ["auto", "sglang", "vllm"])
def test_what_is_needed_overrides_the_clients_wish(dialect: DialectChoice) -> None:
    asked = complete(WISHES, dialect)
    assert asked["logprobs"] == b"true"
    assert (asked["return_meta_info"], asked["return_prompt_token_ids"]) == (
        (b"false", b"null") if dialect == "vllm" else (b"true", b"true")
    )
    assert asked["return_token_ids"] == (b"false" if dialect == "sglang" else b"true")
    assert asked["top_logprobs"] == (b"null" if dialect == "sglang" else b"0")
    assert (asked["temperature"], asked["model"]) == (b"0.70", b'"m"')


def test_top_logprobs_of_the_client_stay_and_are_never_null_for_vllm() -> None:
    assert complete({"top_logprobs": msgspec.Raw(b"3")}, "auto")["top_logprobs"] == b"3"
    assert complete({}, "vllm")["top_logprobs"] == b"0"
    assert "top_logprobs" not in complete({}, "sglang")


def test_vllm_is_asked_in_its_own_way_for_what_sglang_names_otherwise() -> None:
    asked = {"logprob_start_len": msgspec.Raw(b"4")}
    assert [complete(asked, dialect).get("prompt_logprobs") for dialect in DIALECTS] == [b"0", None, b"0"]


def test_only_sglang_knows_a_rid() -> None:
    assert [takes_rid("auto"), takes_rid("sglang"), takes_rid("vllm")] == [True, True, False]


@pytest.mark.parametrize(
    ("dialect", "model", "asked"),
    [
        ("sglang", b'"m"', {"model": b'"m"', "lora_path": b'"math"'}),
        ("sglang", b'"m:other"', {"model": b'"m"', "lora_path": b'"math"'}),
        ("sglang", b'"m\\u003aother"', {"model": b'"m"', "lora_path": b'"math"'}),
        ("sglang", b'{"a":1}', {"model": b'{"a":1}', "lora_path": b'"math"'}),
        ("sglang", None, {"lora_path": b'"math"'}),
        ("vllm", b'"m"', {"model": b'"math"'}),
        ("vllm", None, {"model": b'"math"'}),
        ("auto", b'"m:other"', {"model": b'"math"', "lora_path": b'"math"'}),
    ],
)
def test_an_adapter_is_asked_for_in_the_engines_own_way(
    dialect: DialectChoice, model: bytes | None, asked: dict[str, bytes]
) -> None:
    fields = {"lora_path": b'"math"', "seed": b"1"} | ({} if model is None else {"model": model})
    assert for_adapter(fields, "math", dialect) == {**asked, "seed": b"1"}


DIALECTS: tuple[DialectChoice, ...] = ("auto", "sglang", "vllm")


def params(**fields: str) -> dict[str, msgspec.Raw]:
    """Parameters as raw JSON."""
    return {name: msgspec.Raw(text.encode()) for name, text in fields.items()}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_is_asked_for_unless_it_is_wanted(dialect: DialectChoice) -> None:
    asked = complete({}, dialect)
    assert not [name for name in asked if "experts" in name or "indexer" in name]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("clients", ["false", "null", "true", "7"])
def test_what_is_wanted_overrides_the_clients_wish(dialect: DialectChoice, clients: str) -> None:
    given = params(return_routed_experts=clients, return_indexer_topk=clients)
    asked = complete(given, dialect, ["routed_experts", "indexer_topk"])
    assert asked["return_routed_experts"] == b"true"
    assert asked["return_indexer_topk"] == (clients.encode() if dialect == "vllm" else b"true")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_vllm_is_not_asked_for_what_it_does_not_have(dialect: DialectChoice) -> None:
    asked = complete({}, dialect, ["indexer_topk"])
    assert ("return_indexer_topk" in asked) == (dialect != "vllm")
    assert "return_routed_experts" not in asked


@pytest.mark.parametrize("dialect", DIALECTS)
def test_which_rows_is_turnlogs_own_to_say(dialect: DialectChoice) -> None:
    given = params(routed_experts_start_len="5", routed_experts_prompt_start="5", other="1")
    kept = complete(given, dialect, ["routed_experts"])
    assert not [name for name in kept if name.startswith("routed_experts")]
    assert kept["other"] == b"1"
    for replay in ([], ["indexer_topk"]):
        untouched = complete(given, dialect, replay)
        assert untouched["routed_experts_start_len"] == untouched["routed_experts_prompt_start"] == b"5"


def test_which_kinds_the_client_asked_for() -> None:
    assert asked_for({}) == frozenset()
    assert asked_for(params(return_routed_experts="true")) == {"routed_experts"}
    assert asked_for(params(return_indexer_topk="true", return_routed_experts="false")) == {"indexer_topk"}
    for text in ("false", "null", "1", '"true"', "{}"):
        assert asked_for(params(return_routed_experts=text)) == frozenset()


@pytest.mark.parametrize(
    ("text", "row"),
    [("0", 0), ("12", 12), ("null", 0), ("-1", 0), ("1.5", 0), ('"7"', 0), ("true", 0), ("9" * 30, 0), ("[3]", 0)],
)
@pytest.mark.parametrize("name", ["routed_experts_start_len", "routed_experts_prompt_start"])
def test_the_first_row_that_the_client_asked_for(name: str, text: str, row: int) -> None:
    assert clients_first_row(params(**{name: text})) == row
    assert clients_first_row({}) == 0


@pytest.mark.parametrize(
    ("dialect", "names"),
    [
        ("sglang", {"routed_experts_start_len"}),
        ("vllm", {"routed_experts_prompt_start"}),
        ("auto", {"routed_experts_start_len", "routed_experts_prompt_start"}),
    ],
)
def test_rows_are_asked_for_under_the_dialects_own_name(dialect: DialectChoice, names: set[str]) -> None:
    body = b'{"a":1' + from_row(42, dialect) + b"}"
    assert json.loads(body) == {"a": 1, **dict.fromkeys(names, 42)}
