"""What an engine is asked for, whatever the client wished."""

from __future__ import annotations

import msgspec
import pytest

from app.upstream.dialects import DialectChoice, complete, for_adapter, takes_rid

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
