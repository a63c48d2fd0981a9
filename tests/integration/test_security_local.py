"""A server without a token: who is on this machine is served, and nobody who only seems to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.guarded import raw
from integration.places import Places
from integration.stand import Stand, error_of, serving
from ops.simulator.process import SimulatorProcess

PAUSE = "POST /fleet/pause HTTP/1.1"


def is_paused(stand: Stand) -> bool:
    found: bool = stand.http.get("/fleet").json()["paused"]
    return found


def host_of(stand: Stand) -> str:
    return f"Host: 127.0.0.1:{stand.server.port}"


@pytest.mark.threat("DNS rebinding")
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "0.0.0.0", "10.0.0.1"])
def test_another_host_name_is_refused(stand: Stand, host: str) -> None:
    for start in ("GET /sessions HTTP/1.1", "GET /nowhere HTTP/1.1", "POST /v1/chat/completions HTTP/1.1", PAUSE):
        status, came = raw(stand.server.port, start, f"Host: {host}:{stand.server.port}", "Content-Length: 0")
        assert status == 403
        assert b'"forbidden"' in came
        assert b"TURNLOG_ADMIN_TOKEN" in came
    assert not is_paused(stand)
    assert raw(stand.server.port, "GET /health HTTP/1.1", f"Host: {host}")[0] == 200
    assert raw(stand.server.port, "GET /health HTTP/1.0")[0] == 200
    assert raw(stand.server.port, "GET /sessions HTTP/1.0")[0] == 403
    assert raw(stand.server.port, "GET /sessions HTTP/1.1", "Host: localhost", f"Host: {host}")[0] in (400, 403)


@pytest.mark.threat("cross-site request to a local server")
@pytest.mark.parametrize(
    "lines",
    [
        ("Origin: https://evil.example", "Content-Type: text/plain"),
        ("Origin: null",),
        ("Origin: http://localhost:3000", "Sec-Fetch-Site: same-site"),
        ("Sec-Fetch-Site: cross-site",),
    ],
    ids=lambda lines: lines[0],
)
def test_a_simple_post_of_another_site_pauses_nothing(stand: Stand, lines: tuple[str, ...]) -> None:
    status, _ = raw(stand.server.port, PAUSE, host_of(stand), *lines, "Content-Length: 0")
    assert status == 403
    assert not is_paused(stand)
    preflight = ("OPTIONS /fleet/pause HTTP/1.1", host_of(stand), *lines, "Access-Control-Request-Method: POST")
    status, came = raw(stand.server.port, *preflight)
    assert status == 403
    assert b"access-control-allow" not in came.lower()


@pytest.mark.threat("local proxy without a token")
@pytest.mark.parametrize(
    "line",
    [
        *(
            "X-Forwarded-For: 203.0.113.9",
            "X-Forwarded-For: 127.0.0.1",
            "X-Forwarded-Proto: https",
            "X-Real-IP: 127.0.0.1",
        ),
        *("Forwarded: for=127.0.0.1", "X-Forwarded-Host: localhost", "X-FORWARDED-FOR:"),
    ],
)
def test_what_a_proxy_passes_on_is_refused(stand: Stand, line: str) -> None:
    assert raw(stand.server.port, "GET /sessions HTTP/1.1", host_of(stand), line)[0] == 403
    assert raw(stand.server.port, "GET /sessions HTTP/1.1", host_of(stand))[0] == 200


@pytest.fixture(scope="module")
def trusting(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """Believes a proxy's header from anybody, as an operator may have chosen for other reasons."""
    environment = {"TURNLOG_TRUSTED_NETWORKS": "10.0.0.0/8, 127.0.0.9", "FORWARDED_ALLOW_IPS": "*"}
    with serving(places.new("trusting"), sglang.base_url, environment=environment) as made:
        yield made


@pytest.mark.threat("forged client address")
def test_a_header_puts_nobody_into_a_trusted_network(trusting: Stand) -> None:
    """uvicorn then takes the header's word for who the client is."""
    port = trusting.server.port
    for name in ("X-Forwarded-For", "x-forwarded-for"):
        assert raw(port, "GET /sessions HTTP/1.1", host_of(trusting), f"{name}: 10.1.2.3")[0] == 403
        assert raw(port, "GET /sessions HTTP/1.1", "Host: turnlog.internal", f"{name}: 10.1.2.3")[0] == 403
    assert raw(port, "GET /sessions HTTP/1.1", host_of(trusting))[0] == 200


def test_who_is_in_a_trusted_network_may_come_by_any_name_and_through_a_proxy(trusting: Stand) -> None:
    lines = ("GET /sessions HTTP/1.1", "Host: turnlog.internal", "X-Forwarded-For: 203.0.113.9")
    assert raw(trusting.server.port, *lines, source="127.0.0.9")[0] == 200
    assert raw(trusting.server.port, *lines, source="127.0.0.8")[0] == 403
    drive_by = raw(
        trusting.server.port, PAUSE, "Host: turnlog.internal", "Origin: https://evil.example", source="127.0.0.9"
    )
    assert drive_by[0] == 403


def test_signing_in_where_no_token_is_needed_sets_nothing(stand: Stand) -> None:
    reply = stand.http.post("/ui/sign-in", json={"token": "anything"})
    assert reply.status_code == 200
    assert "set-cookie" not in reply.headers
    assert "token" not in stand.http.post("/sessions", json={}).json()
    assert stand.http.get("/sessions", headers={"authorization": "Bearer unused"}).status_code == 200


@pytest.mark.threat("oversized request head")
def test_a_head_has_limits(stand: Stand) -> None:
    assert error_of(stand.http.get("/health", headers={"x-much": "v" * (64 << 10)})) == (431, "headers_too_large")
    assert error_of(stand.http.get("/health", params={"q": "v" * (16 << 10)})) == (414, "target_too_long")
    assert error_of(stand.http.get("/" + "p" * (16 << 10))) == (414, "target_too_long")
    assert error_of(stand.http.get("/sessions", params=[("a", "1")] * 257)) == (400, "invalid_request")
    chat = stand.http.post("/sessions/a/v1/chat/completions", headers={"x-much": "v" * (64 << 10)}, content=b"{}")
    assert error_of(chat) == (431, "headers_too_large")


@pytest.mark.threat("endless request head")
@pytest.mark.parametrize("piece", [b"x-more: " + b"v" * 1000 + b"\r\n", b"v" * 1000], ids=["headers", "one header"])
def test_an_endless_head_is_answered_before_its_end(stand: Stand, piece: bytes) -> None:
    status, came = raw(stand.server.port, "GET /health HTTP/1.1", host_of(stand), endless=b"x: " + piece * 400)
    assert status == 431
    assert b'"headers_too_large"' in came
    assert came.lower().count(b"connection: close") == 1
