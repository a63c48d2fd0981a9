"""The page's own files: served as they are, to be run by nobody but the page, and nothing else is served."""

from __future__ import annotations

from app.features.page.files import FOLDER, MEDIA_TYPES
from integration.guarded import raw
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


def test_the_page_may_run_its_own_scripts_and_nothing_else(stand: Stand) -> None:
    for path in ("/ui", "/ui/static/index.html", "/ui/static/app.js"):
        headers = stand.http.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy == DIRECTIVES
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_each_file_is_served_as_what_it_is(stand: Stand) -> None:
    for path in sorted(FOLDER.iterdir()):
        found = stand.http.get(f"/ui/static/{path.name}")
        assert (found.status_code, found.content) == (200, path.read_bytes()), path.name
        assert found.headers["content-type"] == MEDIA_TYPES[path.suffix]
        again = stand.http.get(f"/ui/static/{path.name}", headers={"if-none-match": f'"x", {found.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        head = stand.http.head(f"/ui/static/{path.name}")
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", found.headers["etag"])


ELSEWHERE = (
    *("../ui.py", "..%2fui.py", "%2e%2e/ui.py", "..%5cui.py", "/etc/passwd", "%2fetc%2fpasswd"),
    *("", "nothing.js", "app.js%00.html"),
)


def test_nothing_else_is_served(stand: Stand) -> None:
    """Sent as it stands: a client would tidy such a path up first."""
    for name in ELSEWHERE:
        status, reply = raw(
            stand.server.port, f"GET /ui/static/{name} HTTP/1.1", f"host: 127.0.0.1:{stand.server.port}"
        )
        assert status in (404, 400), name
        assert b"import" not in reply
        assert b"root:" not in reply


def test_the_page_only_reads(stand: Stand) -> None:
    for path in ("/ui", "/ui/api/overview", "/ui/api/sessions", "/ui/api/live", "/ui/api/exports"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert error_of(stand.http.request(method, path)) == (405, "method_not_allowed")
