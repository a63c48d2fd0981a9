"""What engines are asked for of replay payloads, and what of it the client wished itself."""

from __future__ import annotations

import json

import msgspec
import pytest

from app.upstream.dialects import DialectChoice, asked_for, clients_first_row, complete, from_row

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
