"""Engines' replies, sound ones, as Python objects that a test may spoil."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]
Spoil = Callable[[Reply], None]

MESSAGE = {"role": "assistant", "content": "hello"}


def sglang(
    prompt: list[int] | None = None, output: list[int] | None = None, logprobs: list[float] | None = None
) -> Reply:
    prompt = [1, 2, 3] if prompt is None else prompt
    output = [4, 5] if output is None else output
    logprobs = [-0.25] * len(output) if logprobs is None else logprobs
    return {
        "id": "r",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": dict(MESSAGE),
                "logprobs": None,
                "finish_reason": "stop",
                "prompt_token_ids": prompt,
                "meta_info": {
                    "id": "r",
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(output),
                    "weight_version": "7",
                    "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, output, strict=True)],
                },
            }
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(output)},
    }


def vllm(
    prompt: list[int] | None = None, output: list[int] | None = None, logprobs: list[float] | None = None
) -> Reply:
    prompt = [1, 2, 3] if prompt is None else prompt
    output = [4, 5] if output is None else output
    logprobs = [-0.25] * len(output) if logprobs is None else logprobs
    return {
        "id": "r",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "prompt_token_ids": prompt,
        "choices": [
            {
                "index": 0,
                "message": dict(MESSAGE),
                "token_ids": output,
                "logprobs": {"content": [{"token": "t", "logprob": lp, "bytes": None} for lp in logprobs]},
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(output)},
    }


def encode(reply: Any) -> bytes:
    return json.dumps(reply).encode()


def spoiled(reply: Reply, *path: Any, to: Any) -> bytes:
    """`reply` with the value at `path` replaced; `to` may be raw JSON text as `Text`."""
    made = copy.deepcopy(reply)
    place: Any = made
    for step in path[:-1]:
        place = place[step]
    if to is GONE:
        del place[path[-1]]
        return encode(made)
    marker = "\x00marker\x00"
    place[path[-1]] = marker if isinstance(to, Text) else to
    return encode(made).replace(json.dumps(marker).encode(), to.raw) if isinstance(to, Text) else encode(made)


class Text:
    """Raw JSON that `json.dumps` would not write."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __repr__(self) -> str:
        return self.raw[:40].decode(errors="replace")


GONE = object()
