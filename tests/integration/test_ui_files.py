"""The page's own files: served as they are, to be run by nobody but the page, and nothing else is served."""

from __future__ import annotations

import socket

import pytest

from app.features.page.files import FOLDER, MEDIA_TYPES
from integration.stand import Stand, error_of

DIRECTIVES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
}

NAMES = sorted(path.name for path in FOLDER.iterdir())


def test_the_page_may_run_its_own_scripts_and_nothing_else(stand: Stand) -> None:
    for path in ("/ui", "/ui/static/index.html", "/ui/static/app.js"):
        headers = stand.http.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy == DIRECTIVES
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_served_as_what_it_is(stand: Stand, name: str) -> None:
    found = stand.http.get(f"/ui/static/{name}")
    assert found.status_code == 200
    assert found.content == (FOLDER / name).read_bytes()
    assert found.headers["content-type"] == MEDIA_TYPES[FOLDER.joinpath(name).suffix]
    again = stand.http.get(f"/ui/static/{name}", headers={"if-none-match": f'"x", {found.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    head = stand.http.head(f"/ui/static/{name}")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", found.headers["etag"])


def test_the_page_is_at_its_address_with_and_without_a_slash(stand: Stand) -> None:
    page = stand.http.get("/ui")
    assert page.content == (FOLDER / "index.html").read_bytes()
    assert stand.http.get("/ui/").next_request is not None
    assert str(stand.http.get("/ui/").next_request.url) == f"{stand.server.base_url}/ui"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "path",
    [
        "/ui/static/../ui.py",
        "/ui/static/..%2fui.py",
        "/ui/static/%2e%2e/ui.py",
        "/ui/static/..%5cui.py",
        "/ui/static//etc/passwd",
        "/ui/static/%2fetc%2fpasswd",
        "/ui/static/",
        "/ui/static/nothing.js",
        "/ui/static/app.js%00.html",
    ],
)
def test_nothing_else_is_served(stand: Stand, path: str) -> None:
    """Sent as it stands: a client would tidy such a path up first."""
    with socket.create_connection(("127.0.0.1", stand.server.port), timeout=20) as connection:
        request = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{stand.server.port}\r\nconnection: close\r\n\r\n"
        connection.sendall(request.encode())
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert reply.split(b" ", 2)[1] in (b"404", b"400"), reply[:200]
    assert b"import" not in reply
    assert b"root:" not in reply


def test_who_looks_need_not_sign_in_where_there_are_no_tokens(stand: Stand) -> None:
    found = stand.http.get("/ui/api/me").json()
    assert (found["signed_in"], found["auth"]) == (True, "none")
    assert found["release"] == stand.http.get("/openapi.json").json()["info"]["version"]


def test_the_page_only_reads(stand: Stand) -> None:
    for path in ("/ui", "/ui/api/overview", "/ui/api/sessions", "/ui/api/live", "/ui/api/exports"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert error_of(stand.http.request(method, path)) == (405, "method_not_allowed")
