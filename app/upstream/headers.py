"""Which headers are passed on, by an allowlist in each direction."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

FORWARDED = frozenset({"x-request-id", "traceparent", "tracestate", "baggage", "x-dynamo-session-final"})
"""The client's headers that an engine gets: tracing, and that its session ends. Never credentials or cookies."""

ROUTING = ("x-smg-routing-key", "x-session-id", "x-dynamo-session-id")
"""By which a router keeps a session on one engine: SGLang's; vLLM's and SkyRL's; Dynamo's."""

PARENT = "x-dynamo-parent-session-id"

PASSED = frozenset(
    {"content-type", "content-language", "retry-after", "retry-after-ms", "vary", "server-timing", "traceresponse"}
)
PASSED_PREFIXES = ("x-", "openai-", "anthropic-", "engine-", "sglang-", "vllm-", "inference-", "ratelimit-", "request-")
"""An engine's headers that a client gets: the content's description, retry times, and headers for clients of such
engines. Not those that our own server sets (`Server`, `Date`, framing), nor those that browsers act on (cookies, CORS,
redirects, caching)."""

NOT_PASSED = frozenset({"x-real-ip", "x-frame-options", "x-content-type-options", "x-xss-protection", *ROUTING, PARENT})
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
"""Exceptions: headers that we set ourselves, that browsers act on, or that make a proxy serve its own files."""

PASSED_OF_VENDORS = frozenset({"content-type", "retry-after", "retry-after-ms", "x-request-id", "x-should-retry"})
PASSED_OF_VENDORS_PREFIXES = ("x-ratelimit-", "ratelimit-")
"""A vendor's headers that a client gets: others name the operator's organisation, project and region."""

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Not allowed in a header's value (RFC 9110, section 5.5); a server would abort a reply with them."""

_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")

Headers = list[tuple[str, str]]


def to_engine(
    client: Iterable[tuple[str, str]], session_id: str, api_key: str | None, parent: str | None = None
) -> Headers:
    """The routing headers keep a session on one engine behind a router, whatever the client sent. `parent` is the
    session whose sub-agent this one is."""
    headers = [(name, value) for name, value in client if name in FORWARDED]
    headers += [
        ("content-type", "application/json"),
        ("accept-encoding", "identity"),
        *((name, session_id) for name in ROUTING),
    ]
    if parent is not None:
        headers.append((PARENT, parent))
    if api_key:
        headers.append(("authorization", f"Bearer {api_key}"))
    return headers


def with_request_id(headers: Headers, rid: str) -> Headers:
    """The headers of a generation of vLLM, which makes its id of `X-Request-Id`; SGLang takes a `rid`."""
    return [*((name, value) for name, value in headers if name != "x-request-id"), ("x-request-id", rid)]


def to_control(api_key: str | None) -> Headers:
    """Headers for requests that belong to no session."""
    headers = [("content-type", "application/json"), ("accept-encoding", "identity")]
    return headers + ([("authorization", f"Bearer {api_key}")] if api_key else [])


def to_vendor(api_key: str | None) -> Headers:
    """None of the client's headers, and none that routers of engines read: it is another company's server."""
    return [*to_control(api_key), ("user-agent", "turnlog")]


def from_vendor(headers: Iterable[tuple[str, str]]) -> Headers:
    """The vendor's headers that a client gets."""
    return [
        (name, value)
        for name, value in to_client(headers)
        if name in PASSED_OF_VENDORS or name.startswith(PASSED_OF_VENDORS_PREFIXES)
    ]


def to_client(engine: Iterable[tuple[str, str]]) -> Headers:
    """The engine's headers that are passed on, names in lower case, without those listed in Connection."""
    named = [(name.lower(), value) for name, value in engine]
    listed = {token.strip().lower() for name, value in named if name == "connection" for token in value.split(",")}
    return [
        (name, value) for name, value in named if _passes(name) and name not in listed and not _CONTROL.search(value)
    ]


@lru_cache(maxsize=1024)
def _passes(name: str) -> bool:
    if name in PASSED:
        return True
    is_other = name in NOT_PASSED or name.startswith(NOT_PASSED_PREFIXES)
    return name.startswith(PASSED_PREFIXES) and not is_other and _NAME.fullmatch(name) is not None
