"""Engines' replies for the tests, in SGLang's and vLLM's shapes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

DEEP = "[" * 150 + "]" * 150
PLACE = "@here@"

SGLANG: dict[str, Any] = {
    "id": "r1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hé", "reasoning_content": None, "tool_calls": None},
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": 7,
            "prompt_token_ids": [1, 2, 3],
            "meta_info": {
                "id": "r1",
                "finish_reason": {"type": "stop", "matched": 7},
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "weight_version": "12",
                "output_token_logprobs": [[-0.25, 10, "h"], [-1, 11, None]],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    "metadata": {"weight_version": "12"},
}

VLLM: dict[str, Any] = {
    "id": "r1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hé", "reasoning": None, "tool_calls": []},
            "logprobs": {
                "content": [
                    {"token": "h", "logprob": -0.25, "bytes": [104], "top_logprobs": []},
                    {"token": "é", "logprob": -1, "bytes": None, "top_logprobs": []},
                ]
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [10, 11],
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}

SHAPES = {"sglang": SGLANG, "vllm": VLLM}
Change = Callable[[dict[str, Any]], None]


def put(path: str, value: Any) -> Change:
    """Set what stands at `path` (dots between names and numbers)."""

    def change(reply: dict[str, Any]) -> None:
        target, last = _at(reply, path)
        target[last] = value

    return change


def drop(path: str) -> Change:
    def change(reply: dict[str, Any]) -> None:
        target, last = _at(reply, path)
        del target[last]

    return change


def _at(reply: Any, path: str) -> tuple[Any, Any]:
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parts:
        reply = reply[part]
    return reply, last


def body_of(shape: str, *changes: Change) -> bytes:
    reply = copy.deepcopy(SHAPES[shape])
    for change in changes:
        change(reply)
    return json.dumps(reply).encode()


def literal(shape: str, path: str, text: str) -> bytes:
    """A body in which `text`, JSON or not, stands at `path`."""
    return body_of(shape, put(path, PLACE)).replace(f'"{PLACE}"'.encode(), text.encode(), 1)
