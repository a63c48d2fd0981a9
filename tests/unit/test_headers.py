"""Which headers pass, each way."""

from __future__ import annotations

import pytest

from app.upstream.headers import (
    NOT_PASSED,
    NOT_PASSED_PREFIXES,
    PARENT,
    PASSED,
    PASSED_PREFIXES,
    ROUTING,
    to_client,
    to_engine,
)

HOP_BY_HOP = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade"),
)
OURS = ("content-length", "content-encoding", "server", "date", "x-turnlog-turn", "x-turnlog-replayed")
FOR_BROWSERS = (
    *("set-cookie", "alt-svc", "location", "refresh", "link", "strict-transport-security", "clear-site-data"),
    *("access-control-allow-origin", "access-control-allow-credentials", "content-disposition", "cache-control"),
    *("content-security-policy", "cross-origin-resource-policy", "www-authenticate", "service-worker-allowed"),
    *("nel", "report-to", "sourcemap"),
)
FOR_PROXIES = ("x-accel-redirect", "x-accel-buffering", "x-sendfile", "x-forwarded-for", "x-reproxy-url")
"""nginx and others take these from a reply as an order, for one to send a file of theirs instead."""


OTHERS = [*sorted(NOT_PASSED), "made-up", *(f"{prefix}anything" for prefix in NOT_PASSED_PREFIXES)]


@pytest.mark.threat("client credentials sent to an engine")
def test_credentials_and_routing_of_the_client_never_reach_the_engine() -> None:
    client = [
        ("authorization", "Bearer client"),
        ("cookie", "a=b"),
        ("x-api-key", "k"),
        *((name, "elsewhere") for name in (*ROUTING, PARENT)),
        ("host", "h"),
        ("content-length", "7"),
        ("accept-encoding", "gzip"),
        ("traceparent", "00-1"),
        ("x-dynamo-session-final", "true"),
    ]
    sent = to_engine(client, "s1", None)
    assert dict(sent) == {
        "traceparent": "00-1",
        "x-dynamo-session-final": "true",
        "content-type": "application/json",
        "accept-encoding": "identity",
        "x-smg-routing-key": "s1",
        "x-session-id": "s1",
        "x-dynamo-session-id": "s1",
    }
    assert len(sent) == 7
    assert to_engine(client, "s1", None, "s0") == [*sent, ("x-dynamo-parent-session-id", "s0")]


def test_our_own_key_goes_to_the_engine() -> None:
    assert dict(to_engine([("authorization", "x")], "s", "ours"))["authorization"] == "Bearer ours"


@pytest.mark.threat("engine header for browsers or proxies")
@pytest.mark.parametrize("name", [*HOP_BY_HOP, *OURS, *FOR_BROWSERS, *FOR_PROXIES, *OTHERS])
@pytest.mark.parametrize("case", [str.lower, str.title, str.upper])
def test_what_is_not_the_engines_to_say_ends_here(name: str, case: type[str]) -> None:
    assert to_client([(case(name), "x"), ("X-Own", "1")]) == [("x-own", "1")]


def test_what_connection_names_ends_here_too() -> None:
    assert to_client([("Connection", "close, X-Private"), ("X-PRIVATE", "1"), ("X-Own", "A")]) == [("x-own", "A")]
    assert to_client([("Vary", "a"), ("vary", "b")]) == [("vary", "a"), ("vary", "b")], "repeated ones, in order"


@pytest.mark.parametrize("name", [*sorted(PASSED), *(f"{prefix}own" for prefix in PASSED_PREFIXES)])
def test_what_only_clients_of_engines_read_passes(name: str) -> None:
    assert to_client([(name.title(), "v")]) == [(name, "v")]


@pytest.mark.threat("response splitting by an engine header")
@pytest.mark.parametrize("value", ["a\x01b", "\x7f", "a\r\nset-cookie: b=c", "a\x00"])
def test_what_no_header_may_hold_ends_here(value: str) -> None:
    assert to_client([("x-own", value), ("x-other", "tab\tand caf\xe9")]) == [("x-other", "tab\tand caf\xe9")]
    assert to_client([(f"x-{value}", "v")]) == []
