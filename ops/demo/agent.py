"""An agent like those of common harnesses: chat completions, tools, and a loop that repeats a failed call."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

REPEAT_PAUSE_S = 0.25
"""Pause in seconds before the agent repeats a call that failed."""

GIVE_UP_S = 40.0
MAX_TURNS_PER_TASK = 8

BOILING_C = {"water": 100.0, "ethanol": 78.4, "acetone": 56.1, "mercury": 356.7}
_FACTOR = {"type": "integer", "minimum": 2, "maximum": 99}
TOOLS: dict[str, tuple[Callable[..., object], str, dict[str, object]]] = {
    "multiply": (lambda a, b: a * b, "The product of two integers.", {"a": _FACTOR, "b": _FACTOR}),
    "count_words": (lambda text: len(text.split()), "How many words a text has.", {"text": {"type": "string"}}),
    "boiling_point": (
        lambda substance: BOILING_C[substance],
        "Boiling point at one atmosphere, in degrees Celsius.",
        {"substance": {"type": "string", "enum": list(BOILING_C)}},
    ),
}
DESCRIPTIONS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, (_, description, properties) in TOOLS.items()
]


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str


def _run(call: Call) -> str:
    """The result as text for the model; an invalid call's is the error."""
    try:
        return json.dumps({"result": TOOLS[call.name][0](**json.loads(call.arguments))})
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A turn whose reply reached the agent, so it must not be lost.

    `message_index` is the index of its assistant message. A stream has no token ids, so these fields and
    `reply_sha256` are None.
    """

    turn: int
    key: str
    reply_sha256: str | None
    message_index: int
    text: str
    calls: tuple[Call, ...]
    output_tokens: int
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    logprobs: list[float] | None


@dataclass(slots=True)
class Agent:
    """`client` has the session's base URL. `timeout_s` is its patience with a request, in seconds; None is no end."""

    name: str
    client: httpx.AsyncClient
    session_id: str
    tasks: Sequence[str]
    stream: bool = False
    timeout_s: float | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    seen: list[Acknowledged] = field(default_factory=list)
    repeated: int = 0
    replayed: int = 0

    async def run(self) -> None:
        """Work through the tasks. Raises httpx.HTTPError."""
        self.messages.append({"role": "system", "content": f"You are {self.name}. Use your tools."})
        for task in self.tasks:
            self.messages.append({"role": "user", "content": task})
            for _ in range(MAX_TURNS_PER_TASK):
                reply = await self._turn()
                self._remember(reply)
                if not reply.calls:
                    break

    async def _turn(self) -> Acknowledged:
        """Run one turn, repeating the request with the same idempotency key until it succeeds or GIVE_UP_S have
        passed."""
        key = f"{self.session_id}/{len(self.seen) + 1}"
        deadline = asyncio.get_running_loop().time() + GIVE_UP_S
        while True:
            try:
                return await self._ask(key)
            except httpx.HTTPStatusError as error:
                if not error.response.is_server_error or asyncio.get_running_loop().time() > deadline:
                    raise
            except httpx.TransportError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            self.repeated += 1
            await asyncio.sleep(REPEAT_PAUSE_S)

    async def _ask(self, key: str) -> Acknowledged:
        asked = {
            "model": "simulator",
            "messages": self.messages,
            "tools": DESCRIPTIONS,
            "stream": self.stream,
            "logprobs": True,
            "return_meta_info": True,
            "return_prompt_token_ids": True,
        }
        headers = {"Idempotency-Key": key}
        raw = await self.client.post("chat/completions", json=asked, headers=headers, timeout=self.timeout_s)
        raw.raise_for_status()
        choice = _streamed(raw.text) if self.stream else raw.json()["choices"][0]
        message = choice["message"]
        self.replayed += raw.headers.get("x-turnlog-replayed") == "true"
        called = message.get("tool_calls") or ()
        sampled = (choice.get("meta_info") or {}).get("output_token_logprobs")
        return Acknowledged(
            turn=int(raw.headers["x-turnlog-turn"]),
            key=key,
            reply_sha256=None if self.stream else hashlib.sha256(raw.content).hexdigest(),
            message_index=len(self.messages),
            text=message.get("content") or "",
            calls=tuple(Call(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in called),
            output_tokens=len(choice["logprobs"]["content"]) if sampled is None else len(sampled),
            prompt_ids=choice.get("prompt_token_ids"),
            output_ids=None if sampled is None else [entry[1] for entry in sampled],
            logprobs=None if sampled is None else [entry[0] for entry in sampled],
        )

    def _remember(self, reply: Acknowledged) -> None:
        self.seen.append(reply)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.calls
            ]
        self.messages.append(message)
        for call in reply.calls:
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": _run(call)})


def _streamed(stream: str) -> dict[str, Any]:
    """A stream's chunks as the one choice that they make. Raises httpx.RemoteProtocolError if its end is missing."""
    content = ""
    calls: dict[int, Any] = {}
    logprobs: list[Any] = []
    said = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    if said[-1:] != ["[DONE]"]:
        raise httpx.RemoteProtocolError("the stream has no end")
    for chunk in map(json.loads, said[:-1]):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            logprobs += (choice.get("logprobs") or {}).get("content") or ()
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(
                    part["index"], {"id": part.get("id"), "function": {"name": "", "arguments": ""}}
                )
                for name, text in part["function"].items():
                    call["function"][name] += text or ""
    return {"message": {"content": content, "tool_calls": list(calls.values())}, "logprobs": {"content": logprobs}}
