"""A vendor's API in OpenAI's shape: it wants its key, refuses what it does not know, and tells no ids."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ops.simulator.config import Config
from ops.simulator.generation import Generation, ReplyWriter, encode, tool_calls
from ops.simulator.wire import BadRequest, ChatRequest, CompletionRequest, Reply, Request, json_reply

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
    return None


def check(request: ChatRequest) -> None:
    """`refusal` has looked at the fields."""


def render(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    draft = generation.draft
    message: dict[str, object] = {"role": "assistant", "content": draft.content or None, "refusal": None}
    if draft.reasoning:
        message["reasoning_content"] = draft.reasoning
    if draft.calls:
        calls = tool_calls(draft)
        message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": draft.finish}
    return _reply(generation, "chat.completion", choice, writer)


def completion(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    draft = generation.draft
    choice = {"index": 0, "text": draft.text, "logprobs": None, "finish_reason": draft.finish}
    return _reply(generation, "text_completion", choice, writer)


def _reply(
    generation: Generation[ChatRequest] | Generation[CompletionRequest],
    kind: str,
    choice: dict[str, object],
    writer: ReplyWriter,
) -> Reply:
    body = encode(
        {
            "id": f"chatcmpl-{generation.id}",
            "object": kind,
            "created": generation.created,
            "model": f"{generation.request.model}-2026-08-01",
            "choices": [choice],
            "usage": {**generation.usage, "completion_tokens_details": {"reasoning_tokens": 0}},
            "service_tier": "default",
            "system_fingerprint": "fp_simulated",
        }
    )
    return replace(Reply(writer.padded([body[:-1]], generation.sim.body_bytes)), headers=VENDOR)


def stream(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    raise BadRequest("this vendor is not asked for streams")
