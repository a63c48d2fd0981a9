"""The end of a `/generate` stream that SGLang 0.5.23 aborts in its waiting queue, as its own server wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.upstream.generate import GenerateStream
from app.upstream.streams import BadStream

TOKENS = [
    [-0.082, 82, "s"],
    [-3.9960001, 78, "o"],
    [-0.11200020000000001, 278, "me"],
    [-0.035000300000000005, 284, " w"],
]
ENDED = {"type": "abort", "message": "Abort in waiting queue"}


def event(text: str, ids: list[int], triples: list[list[Any]], completion: int, **more: Any) -> bytes:
    meta = {"id": "r", "finish_reason": None, "weight_version": "default", "output_token_logprobs": triples}
    made = {"text": text, "output_ids": ids, "meta_info": {**meta, "completion_tokens": completion, **more}}
    return b"data: " + json.dumps(made).encode() + b"\n\n"


def reply(*events: bytes) -> Any:
    stream = GenerateStream()
    for one in (*events, b"data: [DONE]\n\n"):
        stream.feed(one)
    assert stream.was_aborted
    return json.loads(stream.reply())


SOME = event("so", [82, 78], TOKENS[:2], 2, prompt_tokens=5)
REST = event("me w", [278, 284], TOKENS[2:], 4, prompt_tokens=5)


@pytest.mark.parametrize(
    ("events", "prompt"),
    [
        pytest.param([SOME, REST, event("some w", [284], TOKENS, 4, finish_reason=ENDED)], 5, id="all had come"),
        # The server joins what its client has not read: what is new, and then all of it.
        pytest.param(
            [SOME, event("me w" + "some w", [278, 284, 284], TOKENS[2:] + TOKENS, 4, finish_reason=ENDED)],
            5,
            id="some had not come",
        ),
        pytest.param(
            [event("some w" + "some w", [82, 78, 278, 284, 284], TOKENS + TOKENS, 4, finish_reason=ENDED)],
            0,
            id="none had come",
        ),
    ],
)
def test_what_an_abort_in_the_waiting_queue_repeats_is_read_once(events: list[bytes], prompt: int) -> None:
    made = reply(*events)
    [choice] = made["choices"]
    assert choice["message"]["content"] == "some w"
    assert choice["meta_info"]["output_token_logprobs"] == TOKENS
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["s", "o", "me", " w"]
    assert (made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"]) == (prompt, 4)
    assert ("prompt_tokens" in choice["meta_info"]) == bool(prompt)
    assert choice["finish_reason"] == "abort"


def test_an_abort_before_the_first_token_has_none() -> None:
    made = reply(event("", [], [], 0, finish_reason=ENDED))
    assert made["choices"][0]["message"]["content"] == ""
    assert made["usage"]["prompt_tokens"] == made["usage"]["completion_tokens"] == 0


def test_an_abort_that_repeats_another_text_is_refused() -> None:
    with pytest.raises(BadStream, match="another text"):
        reply(SOME, REST, event("some v", [284], TOKENS, 4, finish_reason=ENDED))


def test_only_an_abort_may_repeat_what_came() -> None:
    for more in ({"finish_reason": {"type": "stop", "matched": 7}}, {"finish_reason": ENDED, "prompt_tokens": 5}):
        with pytest.raises(BadStream, match="other logprobs than ids"):
            reply(SOME, REST, event("some w", [284], TOKENS, 4, **more))
