"""The guard before every route: who asks, and may they?

    no admin token is set    who is on this machine, and no page of another site in a browser here; or a trusted network
    admin token              everything
    session token            that session's own routes; of the routes that name a session in a header, those calls that
                             name it or an agent of it (`header_sessions` looks at that, by what is in TOKEN_SESSION)
    cookie of the page       GET and HEAD

It runs before routing, on the same path that the routers match, so that a route which somebody adds is guarded before
it is thought of. It costs some microseconds of a turn's half a millisecond.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from starlette.types import Scope

from app.api.limits import PEER, beyond
from app.api.tokens import Tokens
from app.domain.patterns import ID
from app.errors import AppError, Forbidden, SessionNotFound, Unauthorized
from app.fleet.engines import MODELS, PATHS
from app.settings import Network

TOKEN_SESSION = "turnlog.token_session"
"""In a scope: the session whose token came with the request; not there for an admin."""

COOKIE = b"turnlog_ui"
SIGN_IN, SIGN_OUT = "/ui/sign-in", "/ui/sign-out"

_READS = frozenset({"GET", "HEAD"})
_OPEN = frozenset({"/health", "/ready"})
_PAGE = frozenset({"/ui", "/ui/"})
_STATIC = "/ui/static/"
_SESSIONS = "/sessions/"
_GENERATING = frozenset(PATHS.values())
_LEASES = "/export/groups"
"""A GET that takes something: a signed-in browser is not enough."""

_WATCHED = frozenset({b"host", b"authorization", b"cookie", b"origin", b"sec-fetch-site", b"forwarded", b"x-real-ip"})
_LOOPBACK_HOST = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_REMEMBERED, _LONGEST = 1024, 64

Marks = dict[bytes, list[bytes]]
"""The values of the headers that matter here; those that a proxy adds are all under `forwarded`."""

Address = tuple[str, int | None] | None


class Guard:
    """`clock` gives seconds since the epoch."""

    def __init__(self, tokens: Tokens, trusted: Sequence[Network] = (), clock: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._needs_token = tokens.are_needed
        self._trusted = tuple(trusted)
        self._clock = clock
        self._is_loopback = lru_cache(_REMEMBERED)(_is_loopback)
        self._is_known = lru_cache(_REMEMBERED)(self._is_in_trusted)

    def refusal(self, scope: Scope) -> AppError | None:
        """Why the request is not served; None: it is. Notes in the scope whose token it came with."""
        marks: Marks = {}
        size = 0
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            if name in _WATCHED:
                marks.setdefault(b"forwarded" if name == b"x-real-ip" else name, []).append(value)
            elif name.startswith(b"x-forwarded-"):
                marks.setdefault(b"forwarded", []).append(value)
        too_much = beyond(scope, size)
        if too_much is not None:
            return too_much
        path = route_path(scope)
        if path in _OPEN and scope["method"] in _READS:
            return None
        if not self._needs_token:
            return self._unless_local(scope, path, marks)
        return self._unless_known(scope, path, marks)

    def _unless_local(self, scope: Scope, path: str, marks: Marks) -> AppError | None:
        """No admin token: the connection is what counts."""
        fault = None if self._is_trusted(scope, marks) else self._not_local(scope, marks)
        if fault is not None:
            return Forbidden(
                f"{fault}, and no TURNLOG_ADMIN_TOKEN is set, so only this machine itself is served: set one, or name "
                "the client's network in TURNLOG_TRUSTED_NETWORKS"
            )
        if _is_foreign(marks) and not (path in _PAGE and scope["method"] in _READS):
            return Forbidden("another site's page sent this: without TURNLOG_ADMIN_TOKEN it is not served")
        return None

    def _not_local(self, scope: Scope, marks: Marks) -> str | None:
        """Why the request did not come from this machine, by a name of this machine; None: it did."""
        peer: Address = scope["client"]
        at: Address = scope["server"]
        hosts = marks.get(b"host", ())
        if b"forwarded" in marks:
            return "the request came through a proxy"
        if peer is None or at is None or not self._is_loopback(peer[0]):
            return "the client's address is not a loopback address"
        if not self._is_loopback(at[0]):
            return "the client did not connect to a loopback address"
        if len(hosts) != 1 or not _LOOPBACK_HOST.fullmatch(hosts[0]):
            return "the Host header is not that of a loopback address"
        return None

    def _is_trusted(self, scope: Scope, marks: Marks) -> bool:
        """Is the peer in a trusted network? Where only a header may say who it is, it is not."""
        if not self._trusted:
            return False
        state = scope.get("state") or {}
        if PEER not in state and b"forwarded" in marks:
            return False
        peer: Address = state[PEER] if PEER in state else scope["client"]
        return peer is not None and len(peer[0]) <= _LONGEST and self._is_known(peer[0])

    def _is_in_trusted(self, host: str) -> bool:
        address = _address(host)
        return address is not None and any(address in network for network in self._trusted)

    def _unless_known(self, scope: Scope, path: str, marks: Marks) -> AppError | None:
        """With admin tokens: what the request brings is what counts."""
        method: str = scope["method"]
        if method in _READS and (path in _PAGE or path.startswith(_STATIC)):
            return None
        if method == "POST" and path in (SIGN_IN, SIGN_OUT):
            return Forbidden("another site's page sent this") if _is_foreign(marks) else None
        given = marks.get(b"authorization")
        if given is None:
            return None if self._has_signed_in(method, path, marks) else Unauthorized("a bearer token is needed")
        scheme, _, token = given[0].partition(b" ")
        token = token.strip(b" \t")
        if len(given) > 1 or scheme.lower() != b"bearer" or not token:
            return Unauthorized("one Authorization header with a bearer token is needed")
        if self._tokens.is_admin(token):
            return None
        token_session = self._tokens.session_of(token)
        if token_session is None:
            return Unauthorized("the bearer token is not known")
        scope[TOKEN_SESSION] = token_session
        return _unless_its_own(token_session, method, path)

    def _has_signed_in(self, method: str, path: str, marks: Marks) -> bool:
        if method not in _READS or path == _LEASES or b"cookie" not in marks or _is_foreign(marks):
            return False
        now = self._clock()
        return any(self._tokens.is_signed_in(cookie, now) for cookie in _cookies(marks[b"cookie"]))


def route_path(scope: Scope) -> str:
    """The path as routers match it: decoded, and without the root path (as Starlette takes that off)."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest[0] == "/" else path


def unknown_session(session_id: str) -> SessionNotFound:
    """What is said of a session that there is not, and of another's: nobody can tell them apart."""
    if re.fullmatch(ID, session_id) is None:
        return SessionNotFound("no session has an id of this form")
    return SessionNotFound(f"session {session_id} does not exist")


def _unless_its_own(token_session: str, method: str, path: str) -> AppError | None:
    if path.startswith(_SESSIONS):
        named = path[len(_SESSIONS) :].partition("/")[0]
        return None if named == token_session else unknown_session(named)
    if (method == "POST" and path in _GENERATING) or (method in _READS and path == MODELS):
        return None
    return Forbidden("a session's token is for that session's routes alone")


def _is_foreign(marks: Marks) -> bool:
    """Did a page of another site have a browser send this? Browsers say so, and let no page change what they say."""
    sites = marks.get(b"sec-fetch-site")
    if sites is not None:
        return any(site not in (b"same-origin", b"none") for site in sites)
    own = marks.get(b"host", [b""])[0].lower()
    return any(origin.partition(b"://")[2].lower() != own for origin in marks.get(b"origin", ()))


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for what is no address. An IPv4 address stays one in IPv6's notation."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _cookies(headers: Sequence[bytes]) -> list[bytes]:
    """The values of the page's cookie."""
    pairs = [pair.strip().partition(b"=") for header in headers for pair in header.split(b";")]
    return [value for name, _, value in pairs if name == COOKIE]
