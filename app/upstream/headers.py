"""Which headers pass, each way: an allowlist both times."""

from __future__ import annotations

import re
from collections.abc import Iterable

FORWARDED = frozenset({"x-request-id", "traceparent", "tracestate", "baggage"})
"""What of the client's headers an engine gets: tracing. Never credentials or cookies."""

PASSED = frozenset(
    {"content-type", "content-language", "retry-after", "retry-after-ms", "vary", "server-timing", "traceresponse"}
)
PASSED_PREFIXES = ("x-", "openai-", "anthropic-", "engine-", "sglang-", "vllm-", "inference-", "ratelimit-", "request-")
"""What of an engine's headers a client gets: what it is and when to come again, and what nobody but clients of such
engines reads. Not what our own server says (`Server`, `Date`, framing), nor what browsers act on (cookies, CORS,
redirects, caching)."""

NOT_PASSED = frozenset(
    {"x-real-ip", "x-frame-options", "x-content-type-options", "x-xss-protection", "x-smg-routing-key"}
)
NOT_PASSED_PREFIXES = (
    "x-turnlog-",
    "x-forwarded-",
    "x-accel-",
    "x-sendfile",
    "x-lighttpd-",
    "x-litespeed-",
    "x-reproxy-",
    "x-permitted-",
    "x-dns-",
)
"""Of those, what we say ourselves, what browsers act on, and what has a proxy before us serve files of its own."""

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""In no header's value (RFC 9110, section 5.5); a server rather ends a reply than send one that has it."""

_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")

Headers = list[tuple[str, str]]


def to_engine(client: Iterable[tuple[str, str]], session_id: str, api_key: str | None) -> Headers:
    """`X-SMG-Routing-Key` keeps a session on one engine behind SGLang's router, whatever the client sent."""
    headers = [(name, value) for name, value in client if name in FORWARDED]
    headers += [
        ("content-type", "application/json"),
        ("accept-encoding", "identity"),
        ("x-smg-routing-key", session_id),
    ]
    if api_key:
        headers.append(("authorization", f"Bearer {api_key}"))
    return headers


def to_control(api_key: str | None) -> Headers:
    """For what Turnlog asks an engine of its own accord, and of no session."""
    headers = [("content-type", "application/json"), ("accept-encoding", "identity")]
    return headers + ([("authorization", f"Bearer {api_key}")] if api_key else [])


def to_client(engine: Iterable[tuple[str, str]]) -> Headers:
    """Of the engine's own headers those that pass, names in lower case, less those named by Connection."""
    named = [(name.lower(), value) for name, value in engine]
    listed = {token.strip().lower() for name, value in named if name == "connection" for token in value.split(",")}
    return [
        (name, value) for name, value in named if _passes(name) and name not in listed and not _CONTROL.search(value)
    ]


def _passes(name: str) -> bool:
    if name in PASSED:
        return True
    is_other = name in NOT_PASSED or name.startswith(NOT_PASSED_PREFIXES)
    return name.startswith(PASSED_PREFIXES) and not is_other and _NAME.fullmatch(name) is not None
