"""A vendor's API in OpenAI's shape: it wants its key, refuses what it does not know, and tells no ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ops.simulator.completions import read_completion
from ops.simulator.engine import Control, Engine, Route
from ops.simulator.generation import Generation, ReplyWriter
from ops.simulator.vllm import check, check_prompt, read_chat
from ops.simulator.wire import ChatRequest, CompletionRequest, Config, Reply, Request, json_reply

__all__ = ["adapter", "check", "check_prompt", "control", "error", "routes"]

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models")

KNOWN = frozenset(
    {
        *("messages", "model", "prompt", "sim", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n"),
        *("stop", "seed", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "user"),
        *("logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "metadata", "store"),
        *("service_tier", "verbosity", "prompt_cache_key", "safety_identifier"),
    }
)
"""Of a request's fields; `stream` is not: Turnlog asks for whole replies."""

VENDOR = ((b"openai-organization", b"org-of-the-operator"), (b"x-ratelimit-remaining-requests", b"9999"))

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def error(message: str, status: int = 400, kind: str = "", code: str | None = None) -> Reply:
    """A vendor has one type for whatever it refuses."""
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json_reply({"error": fields}, status)


def refusal(path: str, headers: list[tuple[bytes, bytes]], body: bytes, key: str) -> Reply | None:
    """What the vendor says of a request before it looks at the conversation. With a key in it, as vendors do."""
    given = dict(headers).get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
    if key and given != key:
        shown = f"{given[:8]}***{given[-4:]}"
        return error(f"Incorrect API key provided: {shown}.", 401, code="invalid_api_key")
    if path not in ROUTES:
        return error(f"Unknown request URL: {path}", 404, code="unknown_url")
    unknown = set() if not body else _FIELDS.decode(body).keys() - KNOWN
    return error(f"Unrecognized request argument supplied: {sorted(unknown)[0]}") if unknown else None


def adapter(request: Request, config: Config) -> str | None:
    """Any model will do."""
    return None


def render_chat(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    draft = generation.draft
    message: dict[str, object] = {"role": "assistant", "content": draft.content or None, "refusal": None}
    if draft.reasoning:
        message["reasoning_content"] = draft.reasoning
    if draft.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in draft.calls
        ]
    return _reply(generation, "chat.completion", {"message": message}, writer)


def render_completion(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    return _reply(generation, "text_completion", {"text": generation.draft.text}, writer)


def _reply(generation: Generation[Request], kind: str, said: dict[str, object], writer: ReplyWriter) -> Reply:
    value = {
        "id": f"chatcmpl-{generation.id}",
        "object": kind,
        "created": generation.created,
        "model": f"{generation.request.model}-2026-08-01",
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": generation.draft.finish}],
        "usage": {**generation.usage, "completion_tokens_details": {"reasoning_tokens": 0}},
        "service_tier": "default",
        "system_fingerprint": "fp_simulated",
    }
    return replace(writer.reply(generation, value), headers=VENDOR)


_ROUTES = {
    ("POST", "/v1/chat/completions"): Route(read_chat, render_chat, render_chat),
    ("POST", "/v1/completions"): Route(read_completion, render_completion, render_completion),
}


def routes(engine: Engine) -> Mapping[tuple[str, str], Route]:
    return _ROUTES


def control(engine: Engine, path: str) -> Mapping[tuple[str, str], Control]:
    return {}
