"""Which values of a reply are null for a client that did not ask for them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers.replies import SHAPES, body_of

from app.turn.client_reply import shown
from app.turn.turns import Turns
from app.upstream.body import Body
from workers import job
from workers.parse_prompt import PROMPT
from workers.reply import Job, PayloadRange

IDS, ROWS = list(range(1000, 1400)), "A" * 5000
ENTRY = {"token": "]},\"'", "logprob": -0.5, "bytes": None, "top_logprobs": []}
SGLANG = body_of(
    "sglang",
    {
        "choices.0.logprobs": {"content": [ENTRY] * 20},
        "choices.0.prompt_token_ids": IDS,
        "choices.0.response_token_ids": [10, 11],
        "choices.0.meta_info.routed_experts": ROWS,
        "choices.0.meta_info.input_token_logprobs": [[None, 1, None], [-1.0, 2, None]],
    },
    separators=(" , ", " : "),
)
VLLM = body_of(
    "vllm",
    {
        "prompt_token_ids": IDS,
        "kv_transfer_params": {"a": 1},
        "prompt_logprobs": [None],
        "choices.0.routed_experts": ROWS,
        "choices.0.weight_versions": [{"version": "1", "start": 0, "end": 2}],
    },
)
PLACES = {"sglang": SGLANG, "vllm": VLLM}
META = "choices.0.meta_info"
OWN = {
    "sglang": {"choices.0.logprobs", "choices.0.prompt_token_ids", "choices.0.response_token_ids", META},
    "vllm": {
        "choices.0.logprobs",
        "choices.0.token_ids",
        "choices.0.weight_versions",
        "choices.0.routed_experts",
        "prompt_token_ids",
        "kv_transfer_params",
    },
}
META_MEMBERS = {f"{META}.{name}" for name in json.loads(SGLANG)["choices"][0]["meta_info"]}
EXPERTS, INPUT = f"{META}.routed_experts", f"{META}.input_token_logprobs"


def place_of(body: bytes, path: str) -> tuple[int, int]:
    """Where the value is: each key is the only one of its name in the innermost value around it, or the last."""
    text, start = body, 0
    for part in path.split("."):
        if part.isdigit():
            [value] = msgspec.json.decode(text, type=list[msgspec.Raw])
            at = 1
        else:
            value = msgspec.json.decode(text, type=dict[str, msgspec.Raw])[part]
            at = text.rindex(f'"{part}"'.encode())
        at = text.index(bytes(value), at)
        text, start = bytes(value), start + at
    return start, start + len(text)


def with_null(body: bytes, paths: set[str]) -> bytes:
    for start, end in sorted((place_of(body, path) for path in paths), reverse=True):
        if body[start:end] != b"null":
            body = body[:start] + b"null" + body[end:]
    return body


def raw(**params: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in params.items()}


CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("sglang", {}, set()),
    ("sglang", {"logprobs": False, "return_meta_info": None, "top_logprobs": 0}, set()),
    ("sglang", {"logprobs": True}, {"choices.0.logprobs"}),
    ("sglang", {"return_logprob": True}, {"choices.0.logprobs"}),
    ("sglang", {"top_logprobs": 5}, {"choices.0.logprobs"}),
    ("sglang", {"return_prompt_token_ids": True}, {"choices.0.prompt_token_ids"}),
    ("sglang", {"return_token_ids": True}, {"choices.0.prompt_token_ids", "choices.0.response_token_ids"}),
    ("sglang", {"return_meta_info": True}, {META}),
    ("sglang", {"return_meta_info": True, "return_routed_experts": True}, {META, EXPERTS}),
    ("sglang", {"return_routed_experts": True}, {EXPERTS}),
    ("sglang", {"logprob_start_len": 0}, {INPUT}),
    ("sglang", {"prompt_logprobs": 0}, {INPUT}),
    ("vllm", {}, set()),
    ("vllm", {"logprobs": True}, {"choices.0.logprobs"}),
    ("vllm", {"return_token_ids": True}, {"choices.0.token_ids", "prompt_token_ids"}),
    ("vllm", {"return_prompt_token_ids": True}, {"prompt_token_ids"}),
    ("vllm", {"return_routed_experts": True}, {"choices.0.routed_experts"}),
    ("vllm", {"return_weight_versions": True}, {"choices.0.weight_versions"}),
    ("vllm", {"kv_transfer_params": {}}, {"kv_transfer_params"}),
]


@pytest.mark.parametrize(("engine", "params", "kept"), CASES)
def test_only_what_was_asked_for_is_there_and_all_else_is_the_engines(
    engine: str, params: dict[str, Any], kept: set[str]
) -> None:
    body, hidden = PLACES[engine], OWN[engine] - kept
    if META in kept:
        hidden |= {EXPERTS} - kept
    elif kept & {EXPERTS, INPUT}:
        hidden = hidden - {META} | META_MEMBERS - kept
    expected = with_null(body, hidden)
    ids = engine == "sglang" and "return_token_ids" in params
    rows = EXPERTS if engine == "sglang" else "choices.0.routed_experts"
    prompt = f"{'choices.0.' if engine == 'sglang' else ''}{PROMPT}"
    experts = PayloadRange("routed_experts", *place_of(body, rows))
    # A prompt's place is known if it could be cut out; a stored reply has null for its payloads already.
    for places in ([experts], [experts, PayloadRange(PROMPT, *place_of(body, prompt), True)]):
        for cut in (len(body), 100):
            pieces = [body[at : at + cut] for at in range(0, len(body), cut)]
            assert without_token_ids(b"".join(shown(Body(pieces), places, raw(**params))), ids) == whole(expected, ids)
    stored = body if rows in kept else with_null(body, {rows})
    assert without_token_ids(b"".join(shown(Body([stored]), (), raw(**params))), ids) == whole(expected, ids)


def whole(reply: bytes, is_read: bool) -> Any:
    return json.loads(reply) if is_read else reply


def without_token_ids(reply: bytes, are_there: bool) -> Any:
    """SGLang's reply without the ids that it has not under this name itself, where they are asked for."""
    if not are_there:
        return reply
    made = json.loads(reply)
    assert made["choices"][0].pop("token_ids") == [10, 11]
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_that_asks_for_all_gets_the_engines_bytes(shape: str) -> None:
    names = ("logprobs", "return_token_ids", "return_meta_info", "return_weight_versions", "kv_transfer_params")
    body = Body([body_of(shape)])
    parts = shown(body, (), raw(**dict.fromkeys(names, True)))
    is_sglangs = shape.startswith("sglang")
    assert without_token_ids(b"".join(parts), is_sglangs) == whole(body_of(shape), is_sglangs)
    assert (parts is body.pieces) is not is_sglangs


@pytest.mark.parametrize(("logprobs", "is_there"), [(None, False), (0, True), (3, True)])
@pytest.mark.parametrize("shape", ["sglang completion", "vllm completion"])
def test_a_completion_asks_for_logprobs_by_their_number(shape: str, logprobs: int | None, is_there: bool) -> None:
    [choice] = json.loads(b"".join(shown(Body([body_of(shape)]), (), raw(logprobs=logprobs))))["choices"]
    assert (choice["logprobs"] is not None) == is_there
    assert choice["token_ids"] is choice["prompt_token_ids"] is None
    assert choice["text"]


@pytest.mark.anyio
async def test_a_call_whose_arguments_look_like_a_long_list_is_shown_as_it_is() -> None:
    """Its list stands before the long one, under the same key, and is its equal."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"content": []}}}
    changes = {"choices.0.message.content": "", "choices.0.message.tool_calls": [call]}
    body = body_of("sglang", {**changes, "choices.0.logprobs": {"content": []}}, separators=(",", ":"))
    read = job.read(Job("auto", None, [], [b'{"role":"user"}'], [("a", "b")], 200, "rid", b""), memoryview(body))
    assert read.plain["choices"][0]["message"] == json.loads(body)["choices"][0]["message"]
    turns, request = SimpleNamespace(_payloads=lambda *_: ()), SimpleNamespace(protocol="messages")
    shown_body = b"".join(await Turns._shown(turns, request, None, Body([body]), (), read.plain))
    assert json.loads(shown_body)["choices"][0]["message"] == json.loads(body)["choices"][0]["message"]
