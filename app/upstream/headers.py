"""Which headers pass, each way. An allowlist towards the engine, a list of what is not the engine's back."""

from __future__ import annotations

from collections.abc import Iterable

FORWARDED = frozenset({"x-request-id", "traceparent", "tracestate", "baggage"})
"""What of the client's headers an engine gets: tracing. Never credentials or cookies."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, section 7.6.1; they end at each connection."""

OURS = frozenset({"content-length", "content-encoding", "server", "date", "set-cookie", "alt-svc"})
"""What our own server says of a reply, or what would bind the client to the engine."""

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
    """The engine's own headers, names in lower case, less framing, hop-by-hop ones and those named by Connection."""
    named = [(name.lower(), value) for name, value in engine]
    listed = {token.strip().lower() for name, value in named if name == "connection" for token in value.split(",")}
    dropped = HOP_BY_HOP | OURS | listed
    return [(name, value) for name, value in named if name not in dropped]
