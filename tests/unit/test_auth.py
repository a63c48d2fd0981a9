"""The guard: who is served by what they bring, and by where they come from."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest
from tables import rows

from app.api.head import PEER, TOKEN_SESSION, Guard, Head, request_ids, route_path, with_single_slashes
from app.api.limits import MAX_HEADER_BYTES, MAX_PARAMETERS, MAX_TARGET_BYTES
from app.errors import AppError
from app.main import create_app
from app.protocols.registry import ROUTES
from app.settings import Settings
from app.tokens import Tokens

ADMIN = "admin-token-of-the-tests"
NOW = 1_800_000_000.0
TOKENS = Tokens([ADMIN, "the-one-before"])
LOOPBACK = ("127.0.0.1", 50000)
LOCAL = Guard(Tokens(()))
WITH_TOKEN = Guard(TOKENS, clock=lambda: NOW)
TABLE = create_app(Settings()).table

Scope = dict[str, Any]
Pairs = list[tuple[str, str]]


def asked(
    path: str = "/sessions",
    method: str = "GET",
    headers: Pairs | None = None,
    *,
    host: str | None = "127.0.0.1:8080",
    client: tuple[str, int] | None = LOOPBACK,
    server: tuple[str, int | None] | None = ("127.0.0.1", 8080),
    query: bytes = b"",
    **more: Any,
) -> Scope:
    """A request's scope as uvicorn makes it."""
    own = [] if host is None else [("host", host)]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in [*own, *(headers or [])]],
        "client": client,
        "server": server,
        "scheme": "http",
        "state": {},
        **more,
    }


def refusal_of(guard: Guard, scope: Scope) -> AppError | None:
    head = Head(scope, request_ids())
    return guard.refusal(head, TABLE.find(head).who)


def status(guard: Guard, scope: Scope) -> int:
    """0: it is served."""
    refusal = refusal_of(guard, scope)
    return 0 if refusal is None else refusal.status


def bearer(token: str | None) -> Pairs:
    assert token is not None
    return [("authorization", f"Bearer {token}")]


def of(session_id: str) -> Pairs:
    return bearer(TOKENS.for_session(session_id))


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1", "127.8.9.1:65535", "[::1]", "[::1]:8080"])
@pytest.mark.parametrize("at", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.3.2.1"])
def test_this_machine_is_served_without_a_token(host: str, at: str) -> None:
    assert status(LOCAL, asked(host=host, client=(at, 1), server=(at, 8080))) == 0


@pytest.mark.threat("remote access without a token")
@pytest.mark.parametrize(
    "client", ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0", "2001:db8::1", "testclient", "", None]
)
def test_no_other_machine_is(client: str | None) -> None:
    assert status(LOCAL, asked(client=None if client is None else (client, 1))) == 403


@pytest.mark.threat("remote access without a token")
@pytest.mark.parametrize("server", [("10.0.0.1", 8080), ("/run/turnlog.sock", None), None])
def test_nor_who_did_not_speak_to_loopback(server: tuple[str, int | None] | None) -> None:
    assert status(LOCAL, asked(server=server)) == 403


@pytest.mark.threat("DNS rebinding")
@pytest.mark.parametrize("host", rows("auth_foreign_hosts"))
def test_a_host_of_another_name_is_refused(host: str) -> None:
    assert status(LOCAL, asked(host=host)) == 403


def test_there_must_be_one_host() -> None:
    assert status(LOCAL, asked(host=None)) == 403
    assert status(LOCAL, asked(headers=[("host", "127.0.0.1:8080")])) == 403


@pytest.mark.threat("local proxy without a token")
@pytest.mark.parametrize("name", ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"])
def test_what_came_through_a_proxy_is_refused(name: str) -> None:
    assert status(LOCAL, asked(headers=[(name, "127.0.0.1")])) == 403
    refusal = refusal_of(LOCAL, asked(headers=[(name, "127.0.0.1")]))
    assert "TURNLOG_ADMIN_TOKEN" in str(refusal)
    assert "TURNLOG_TRUSTED_NETWORKS" in str(refusal)


TRUSTED = Guard(Tokens(()), [ip_network("10.0.0.0/8"), ip_network("fd00::/8")])


@pytest.mark.parametrize("client", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::5"])
def test_a_trusted_network_is_served_by_any_name(client: str) -> None:
    assert status(TRUSTED, asked(client=(client, 1), server=("10.0.0.1", 80), host="turnlog.internal")) == 0


def test_beside_a_trusted_network_this_machine_is_served_still() -> None:
    assert status(TRUSTED, asked()) == 0
    assert status(TRUSTED, asked(host="turnlog.internal")) == 403
    assert status(TRUSTED, asked(client=("11.0.0.1", 1))) == 403
    assert status(TRUSTED, asked(client=None, server=None)) == 403


@pytest.mark.threat("forged client address")
def test_who_is_in_a_trusted_network_is_not_for_a_header_to_say() -> None:
    forwarded = [("x-forwarded-for", "10.1.2.3")]
    rewritten = asked(headers=forwarded, client=("10.1.2.3", 0))
    assert status(TRUSTED, rewritten) == 403
    assert status(TRUSTED, {**rewritten, "state": {PEER: LOOPBACK}}) == 403
    through_a_trusted_proxy = asked(headers=forwarded, client=("10.1.2.3", 0), state={PEER: ("10.9.9.9", 1)})
    assert status(TRUSTED, through_a_trusted_proxy) == 0
    assert status(TRUSTED, asked(client=None, state={PEER: None})) == 403


FOREIGN = [
    [("origin", "https://evil.example")],
    [("origin", "null")],
    [("origin", "http://127.0.0.1:3000")],
    [("origin", "http://localhost:8080")],
    [("origin", "http://127.0.0.1:8080"), ("origin", "https://evil.example")],
    [("sec-fetch-site", "cross-site")],
    [("sec-fetch-site", "same-site"), ("origin", "http://127.0.0.1:3000")],
    [("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")],
]
OWN = [[("origin", "http://127.0.0.1:8080")], [("sec-fetch-site", "same-origin")], [("sec-fetch-site", "none")], []]


@pytest.mark.threat("cross-site request to a local server")
@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/fleet/pause"), ("GET", "/export/groups"), ("GET", "/sessions"), ("GET", "/ui/static/app.js")],
)
def test_another_sites_page_is_refused_where_no_token_is_needed(headers: Pairs, method: str, path: str) -> None:
    assert status(LOCAL, asked(path, method, headers)) == 403
    assert status(TRUSTED, asked(path, method, headers, client=("10.1.1.1", 1))) == 403


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_own_page_is_served(headers: Pairs) -> None:
    assert status(LOCAL, asked("/fleet/pause", "POST", headers)) == 0


def test_a_link_elsewhere_may_lead_to_the_page() -> None:
    link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]
    assert status(LOCAL, asked("/ui", "GET", link)) == 0
    assert status(LOCAL, asked("/ui", "POST", link)) == 403
    assert status(LOCAL, asked("/ui/api/overview", "GET", link)) == 403


@pytest.mark.parametrize("guard", [LOCAL, WITH_TOKEN], ids=["tokenless", "token"])
@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_is_open(guard: Guard, path: str) -> None:
    stranger: dict[str, Any] = {"client": ("203.0.113.9", 1), "server": ("10.0.0.1", 80), "host": "turnlog.example"}
    assert status(guard, asked(path, **stranger)) == 0
    assert status(guard, asked(path, "HEAD", **stranger)) == 0
    assert status(guard, asked(path, "POST", **stranger)) in (401, 403)
    assert status(guard, asked(path + "/", **stranger)) in (401, 403)


@pytest.mark.parametrize(
    "headers",
    [
        bearer(ADMIN),
        bearer("the-one-before"),
        [("authorization", f"bearer {ADMIN}")],
        [("authorization", f"BEARER  {ADMIN} ")],
        [("x-api-key", ADMIN)],
        [*bearer(ADMIN), ("x-api-key", ADMIN)],
    ],
    ids=str,
)
def test_an_admin_token_is_enough_from_anywhere(headers: Pairs) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
        for path in ("/sessions", "/fleet/pause", "/nowhere", "/sessions/a/v1/chat/completions", ""):
            scope = asked(path, method, headers, client=("203.0.113.9", 1), server=None, host="turnlog.example")
            assert status(WITH_TOKEN, scope) == 0
            assert TOKEN_SESSION not in scope


@pytest.mark.threat("missing token")
@pytest.mark.parametrize(
    "headers",
    rows("auth_no_token"),
    ids=str,
)
def test_no_token_and_an_unknown_one_are_401_everywhere(headers: Pairs) -> None:
    places = (
        "/sessions",
        "/nowhere",
        "/v1/models",
        "/sessions/a/v1/chat/completions",
        "/ui/api/me",
        "//ui",
        "/ui/x",
        "",
    )
    for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
        for path in (*places, "/metrics", "/export", "/health/", "/ui/sign-in/", "/%2e%2e/health"):
            refusal = refusal_of(WITH_TOKEN, asked(path, method, headers))
            assert refusal is not None
            assert (refusal.status, refusal.code) == (401, "unauthorized")
            assert refusal.headers()["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/static/app.js"])
def test_the_pages_files_are_open_because_they_hold_nothing(path: str) -> None:
    assert status(WITH_TOKEN, asked(path)) == 0
    assert status(WITH_TOKEN, asked(path, "HEAD")) == 0
    assert status(WITH_TOKEN, asked(path, "POST")) == 401


OWN_ROUTES = [*rows("auth_own_routes"), *(["POST", route] for route in ROUTES)]


@pytest.mark.parametrize(("method", "path"), OWN_ROUTES)
def test_a_sessions_token_is_for_its_own_routes(method: str, path: str) -> None:
    scope = asked(path, method, of("a"))
    assert status(WITH_TOKEN, scope) == 0
    assert scope[TOKEN_SESSION] == "a"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
def test_a_sessions_token_is_told_that_there_are_no_websockets(path: str) -> None:
    """Codex asks for one first, and goes on with POST at a 426 alone."""
    assert status(WITH_TOKEN, asked(path, "GET", [*of("a"), ("upgrade", "websocket")])) == 0
    assert status(WITH_TOKEN, asked(path, "GET", of("a"))) == 403


ADMINS_ROUTES = rows("auth_admins_routes")


@pytest.mark.threat("session token on an admin route")
@pytest.mark.parametrize(("method", "path"), ADMINS_ROUTES)
def test_a_sessions_token_is_403_on_an_admins_route(method: str, path: str) -> None:
    assert status(WITH_TOKEN, asked(path, method, of("a"))) == 403


@pytest.mark.threat("session token on another session")
@pytest.mark.parametrize(
    "named",
    ["b", "A", "a.", "aa", "", "..", ".", "a:x", "a%2f", "a b", "a\x00", "a\n", "ä", "../a", "b/../a", "x" * 129],
)
@pytest.mark.parametrize("rest", ["", "/events", "/v1/chat/completions", "/../a"])
def test_another_session_is_404_like_one_that_there_is_not(named: str, rest: str) -> None:
    refusal = refusal_of(WITH_TOKEN, asked(f"/sessions/{named}{rest}", "POST", of("a")))
    assert refusal is not None
    assert (refusal.status, refusal.code) == (404, "session_not_found")
    assert named not in ("b", "A", "aa") or str(refusal) == f"session {named} does not exist"


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("", "/sessions/a", "/sessions/a"),
        ("/turnlog", "/turnlog/sessions/a", "/sessions/a"),
        ("/turnlog", "/turnlog", ""),
        ("/turnlog", "/turnlogs/a", "/turnlogs/a"),
        ("/turnlog", "/sessions/a", "/sessions/a"),
    ],
)
def test_the_path_is_the_one_that_routers_match(root: str, path: str, expected: str) -> None:
    from starlette._utils import get_route_path

    scope = {"path": path, "root_path": root}
    assert route_path(scope) == expected == get_route_path(scope)
    assert Head(asked(path, root_path=root), request_ids()).path == expected
    assert status(WITH_TOKEN, asked("/t/sessions/b", "GET", of("a"), root_path="/t")) == 404
    assert status(WITH_TOKEN, asked("/t/sessions/a", "GET", of("a"), root_path="/t")) == 0


def cookie(value: str | None) -> Pairs:
    return [("cookie", f"other=1; turnlog_ui={value}")]


GOOD = TOKENS.cookie_for(ADMIN.encode(), NOW - 60)


def test_a_signed_in_browser_reads() -> None:
    for path in ("/ui/api/me", "/sessions", "/sessions/a", "/export", "/groups/g"):
        assert status(WITH_TOKEN, asked(path, "GET", cookie(GOOD))) == 0
        assert status(WITH_TOKEN, asked(path, "HEAD", [*cookie(GOOD), ("sec-fetch-site", "same-origin")])) == 0
    assert status(WITH_TOKEN, asked(headers=[("cookie", "turnlog_ui=old"), *cookie(GOOD)])) == 0


@pytest.mark.threat("cross-site use of the cookie")
def test_a_cookie_changes_nothing_and_helps_no_other_site() -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert status(WITH_TOKEN, asked("/fleet/pause", method, cookie(GOOD))) == 401
    for headers in FOREIGN:
        assert status(WITH_TOKEN, asked("/sessions", "GET", [*cookie(GOOD), *headers])) == 401
    assert status(WITH_TOKEN, asked("/export/groups", "GET", cookie(GOOD))) == 401
    assert status(WITH_TOKEN, asked("/sessions", "GET", [*cookie(GOOD), *bearer("wrong")])) == 401


NOTE = "/sessions/a/annotations/note"
FROM_PAGE = [("x-turnlog-page", "1")]
SAME_ORIGIN = [("sec-fetch-site", "same-origin")]
OWN_ORIGIN = [("origin", "http://127.0.0.1:8080")]


def test_a_signed_in_browser_writes_an_annotation() -> None:
    for mark in (SAME_ORIGIN, OWN_ORIGIN, [*SAME_ORIGIN, *OWN_ORIGIN]):
        for path in (NOTE, "/sessions/a/annotations/verdict", "/sessions/a/turns/12/annotations/note"):
            for method in ("PUT", "DELETE"):
                assert status(WITH_TOKEN, asked(path, method, [*cookie(GOOD), *FROM_PAGE, *mark])) == 0
    for value in ("", "x", TOKENS.cookie_for(ADMIN.encode(), NOW - 13 * 3600)):
        assert status(WITH_TOKEN, asked(NOTE, "PUT", [*cookie(value), *FROM_PAGE, *SAME_ORIGIN])) == 401


@pytest.mark.threat("cross-site writing of an annotation")
def test_nobody_else_writes_an_annotation_by_the_cookie() -> None:
    """Without the page's header, without a mark of the own origin, or with one of another: no absence is a proof."""
    for given in (
        [],
        SAME_ORIGIN,
        OWN_ORIGIN,
        FROM_PAGE,
        [("x-turnlog-page", "0"), *SAME_ORIGIN],
        [*FROM_PAGE, *FROM_PAGE, *SAME_ORIGIN],
        [*FROM_PAGE, ("sec-fetch-site", "none")],
        [*FROM_PAGE, *OWN_ORIGIN, *OWN_ORIGIN],
        *([*FROM_PAGE, *headers] for headers in FOREIGN),
    ):
        for method in ("PUT", "DELETE"):
            assert status(WITH_TOKEN, asked(NOTE, method, [*cookie(GOOD), *given])) == 401, given
    assert status(WITH_TOKEN, asked(NOTE, "PUT", [*cookie(GOOD), *FROM_PAGE, ("origin", "http://")], host=None)) == 401


@pytest.mark.threat("cross-site use of the cookie")
def test_nothing_but_an_annotation_is_written_by_the_cookie() -> None:
    page = [*cookie(GOOD), *FROM_PAGE, *SAME_ORIGIN]
    for method in ("POST", "PATCH", "OPTIONS"):
        assert status(WITH_TOKEN, asked(NOTE, method, page)) == 401
    for path in (
        "/sessions/a/reward",
        f"{NOTE}/",
        "/sessions/a/b/annotations/note",
        "/sessions//annotations/note",
        f"{NOTE}\n",
        "/annotations/note",
        "/sessions/a/annotations",
        "/sessions/a/annotations/note/b",
        "/sessions/a/turns/b/annotations/note",
        "/sessions/a/turns/1/reward",
        "/sessions/a",
    ):
        for method in ("PUT", "DELETE"):
            assert status(WITH_TOKEN, asked(path, method, page)) == 401, path
    assert status(WITH_TOKEN, asked("/export/groups", "GET", page)) == 401


@pytest.mark.threat("cross-site sign-in or sign-out")
@pytest.mark.parametrize("path", ["/ui/sign-in", "/ui/sign-out"])
def test_signing_in_is_open_but_not_to_other_sites(path: str) -> None:
    for own in OWN:
        assert status(WITH_TOKEN, asked(path, "POST", own)) == 0
    for headers in FOREIGN:
        assert status(WITH_TOKEN, asked(path, "POST", headers)) == 403
    assert status(WITH_TOKEN, asked(path, "GET")) == 401


@pytest.mark.threat("oversized request head")
@pytest.mark.parametrize("guard", [LOCAL, WITH_TOKEN], ids=["tokenless", "token"])
def test_a_head_has_limits(guard: Guard) -> None:
    room = MAX_HEADER_BYTES - len("host127.0.0.1:8080x")
    assert status(guard, asked("/health", headers=[("x", "v" * room)])) == 0
    assert status(guard, asked("/health", headers=[("x", "v" * (room + 1))])) == 431
    assert status(guard, asked("/health", headers=[("x", "v")] * MAX_HEADER_BYTES)) == 431
    query = b"q" * (MAX_TARGET_BYTES - len("/health"))
    assert status(guard, asked("/health", query=query)) == 0
    assert status(guard, asked("/health", query=query + b"q")) == 414
    assert status(guard, asked("/" + "p" * MAX_TARGET_BYTES)) == 414
    assert status(guard, asked("/health", query=b"&".join([b"a=1"] * MAX_PARAMETERS))) == 0
    assert status(guard, asked("/health", query=b"&".join([b"a=1"] * (MAX_PARAMETERS + 1)))) == 400


def test_a_head_that_is_too_large_is_refused_before_the_token_is_looked_at() -> None:
    assert status(WITH_TOKEN, asked("/sessions", headers=[("x", "v" * MAX_HEADER_BYTES)])) == 431


@pytest.mark.parametrize(("path", "single"), rows("auth_slashes"))
@pytest.mark.parametrize("root", ["", "/below"])
def test_the_slashes_that_a_base_url_ended_with_do_not_matter(path: str, single: str, root: str) -> None:
    found = with_single_slashes(asked(root + path, root_path=root))
    assert (found["path"], route_path(found)) == (root + single, single)


@pytest.mark.threat("path confusion between guard and router")
@pytest.mark.parametrize("path", ["//sessions/b", "/sessions//b", "//sessions//b/v1//chat/completions", "//export"])
def test_slashes_open_no_other_session(path: str) -> None:
    token = TOKENS.for_session("a")
    for scope in (asked(path), with_single_slashes(asked(path))):
        scope["headers"].append((b"authorization", f"Bearer {token}".encode()))
        assert refusal_of(WITH_TOKEN, scope) is not None
