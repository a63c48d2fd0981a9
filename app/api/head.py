"""What the head of a request says, read once before a route is chosen; whether it is allowed; and the headers that
every reply gets.

The guard authorises every request by what the table of routes says (`Who`):

    no admin token is set    clients on this machine, except pages of other sites in a browser; trusted networks
    admin token              everything
    session token            the session's own routes; on routes that name a session in a header, the session itself and
                             its agents' sessions (checked by `header_sessions`, which finds the token's session in the
                             scope under TOKEN_SESSION). No reward and no erasure (`Request.require_judge`, which the
                             three routes call that can do that by their path, query or body)
    a run's token            everything within the run: `of_run.admit`, by `Head.run_token`
    the page's cookie        GET and HEAD; PUT and DELETE of annotations, where the page itself sends them. That of a
                             run also only what the run's token opens

A token is sent as `Authorization: Bearer` or, as Anthropic's SDKs do, as `x-api-key`.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from starlette.types import Message, Scope, Send

from app.api.limits import CONNECTION, MAX_HEADER_BYTES, MAX_PARAMETERS, MAX_TARGET_BYTES, PEER
from app.domain.patterns import ANNOTATION, ID, is_id
from app.errors import (
    AppError,
    Forbidden,
    HeadersTooLarge,
    InvalidRequest,
    SessionNotFound,
    TargetTooLong,
    Unauthorized,
)
from app.logs import LogContext
from app.services import Services
from app.settings import Network
from app.tokens import RunToken, Tokens
from app.upstream.headers import Headers

if TYPE_CHECKING:
    from app.api.connection import BoundedProtocol

REQUEST_ID = "x-request-id"
ANTHROPICS = "request-id"
"""The header that Anthropic's SDKs read; the OpenAI SDKs show `x-request-id` as `_request_id`."""

HARDENING = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
"""Keep a browser from running or framing the content of a reply: it holds text of agents and engines, and a browser
that opens one treats it as part of the page's origin. The page's files set their own."""

_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_OF_PROXIES = (b"forwarded", b"x-real-ip")
_SESSIONS = "/sessions/"
_MESSAGES = "/messages"
_ID = re.compile(ID)

GENERATION = b"generation="
"""In a query: which generation of the name in the path."""

RUN = "x-turnlog-run"
"""The header that names the run of the session that the request names."""

_RUN = RUN.encode()

Who = Literal["anyone", "browser", "session", "page", "admin"]
"""Who may ask for a route, where an admin token is set. The admin may always.

    anyone     without a token, from any machine, also where no token is set: probes of health
    browser    without a token: the page's files, and its sign-in, which is refused to other sites' pages
    session    the session's own token; the page's cookie if it is a GET
    page       the page's cookie if it is a GET
    admin      nobody else: it changes something, or is of what sessions must not see
"""

RawHeaders = Sequence[tuple[bytes, bytes]]

TOKEN_SESSION = "turnlog.token_session"
"""Key in a scope: the session of the request's session token; missing for an admin."""

UNKNOWN_TOKEN = "the bearer token is unknown"

COOKIE = b"turnlog_ui"

_READS = frozenset({"GET", "HEAD"})
_BELOW_BASE_URLS = (_SESSIONS, "/v1/", "/ng-rollout/")

_ANNOTATIONS = re.compile(rf"/sessions/{ID[1:-1]}/(turns/[0-9]+/)?annotations/{ANNOTATION[1:-1]}")
"""What the page may write: PUT and DELETE, and only if the page itself sends it (`_is_sent_by_page`)."""

PAGE_HEADER = b"x-turnlog-page"
"""The page sends it with what it writes. A page of another site cannot: a browser would first ask this server, which
answers no such question (CORS)."""

_LOOPBACK_HOST = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_CACHED_ADDRESSES, _MAX_ADDRESS = 1024, 64

AuthHeaders = dict[bytes, list[bytes]]
"""The values of each header by its name."""

Address = tuple[str, int | None] | None


def request_ids() -> Iterator[str]:
    """Ids that no other process gives. They are not secret; a random id each would cost ten times as much."""
    process = secrets.token_hex(5)
    return (f"{process}-{number:x}" for number in itertools.count(1))


class Head(LogContext):
    """A request's head. Log lines name its id and its session.

    `path` is the one that routers match: decoded and without the root path. If it begins with `/sessions/{id}`,
    `path_session` is the id and `route` what follows; else it is None and `route` is the path. `headers` are the values
    of each header by its name in lower case. `is_forwarded`: a proxy's header is among them. `peer` is the address of
    the connection's other end, `connection` the connection, where uvicorn serves it. `own_headers` are those that the
    reply gets: the id, which is the client's own `x-request-id` if that is valid. `path_values` are those of the
    parameters in the path but the session, once the route is found. `run_token`: what the
    request's token of a run says.
    """

    __slots__ = (
        *("connection", "header_bytes", "headers", "is_forwarded", "method", "own_headers"),
        *("path", "path_session", "path_values", "peer", "route", "run_token", "scope"),
    )

    def __init__(self, scope: Scope, ids: Iterator[str]) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"] if not scope.get("root_path") else route_path(scope)
        path = self.path
        self.path_session: str | None = None
        self.path_values: Mapping[str, str] = {}
        self.route = path
        if path.startswith(_SESSIONS):
            name, slash, rest = path[len(_SESSIONS) :].partition("/")
            if name:
                self.path_session, self.route = name, slash + rest
        headers: dict[bytes, list[bytes]] = {}
        size = 0
        is_forwarded = False
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            if name in headers:
                headers[name].append(value)
            else:
                headers[name] = [value]
                if name in _OF_PROXIES or name.startswith(b"x-forwarded-"):
                    is_forwarded = True
        self.headers = headers
        self.header_bytes = size
        self.is_forwarded = is_forwarded
        given = headers.get(b"x-request-id")
        self.request_id = given[0].decode() if given and _VALID_ID.fullmatch(given[0]) else next(ids)
        self.own_headers: Headers = [(REQUEST_ID, self.request_id)]
        if _MESSAGES in path:
            self.own_headers.append((ANTHROPICS, self.request_id))
        self.session_id = self.path_session
        self.has_ended = False
        self.run_token: RunToken | None = None
        state = scope.get("state") or {}
        self.connection: BoundedProtocol | None = state.get(CONNECTION)
        peer = state.get(PEER) or scope["client"]
        self.peer: str | None = None if peer is None else str(peer[0])

    @property
    def run(self) -> str | None:
        """The run in the request's header; None without one. Raises InvalidRequest."""
        given = self.headers.get(_RUN)
        if given is None:
            return None
        run = b", ".join(given).decode("latin-1").strip()
        if not is_id(run):
            raise InvalidRequest(
                f"{RUN} must be 1 to 128 letters, digits, dots, underscores, colons or hyphens, and not only dots"
            )
        return run

    @property
    def token_run(self) -> str | None:
        """The run whose own token the request brought."""
        return None if self.run_token is None else self.run_token.run

    def naming(self, send: Send) -> Send:
        """`send` that adds `own_headers`, but for those that the reply passes on from an engine."""
        return _adding(send, self.own_headers, ())

    def hardening(self, send: Send) -> Send:
        """`send` that adds `own_headers` and HARDENING, but for those that the reply has."""
        return _adding(send, self.own_headers, HARDENING)


def _adding(send: Send, own: Headers, others: RawHeaders) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given: RawHeaders = message["headers"]
            names = {name.lower() for name, _ in given}
            added = [*((name.encode(), value.encode()) for name, value in own), *others]
            message["headers"] = [*given, *(header for header in added if header[0] not in names)]
        await send(message)

    return sending


def route_path(scope: Scope) -> str:
    """The path that the routers match: decoded and without the root path, as in Starlette."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest[0] == "/" else path


def with_single_slashes(scope: Scope) -> Scope:
    """The scope of the same request without the slashes that a base URL ended with: `//sessions/x/v1//messages`.

    Names of groups and adapters may hold several, so behind the first part of a path only the routes of sessions and
    turns lose them. Authorisation and routers must both see the result.
    """
    path = route_path(scope)
    if "//" not in path:
        return scope
    single = "/" + path.lstrip("/")
    if single.startswith(_BELOW_BASE_URLS):
        single = re.sub("//+", "/", single)
    root: str = scope["path"][: len(scope["path"]) - len(path)]
    return {**scope, "path": root + single}


class Guard:
    """Authorises requests. `clock` returns seconds since the epoch."""

    def __init__(self, tokens: Tokens, trusted: Sequence[Network] = (), clock: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._check = self._check_token if tokens.are_needed else self._check_connection
        self._trusted = tuple(trusted)
        self._clock = clock
        self._is_loopback = lru_cache(_CACHED_ADDRESSES)(_is_loopback)
        self._is_in_trusted_network = lru_cache(_CACHED_ADDRESSES)(self._is_in_trusted)

    def refusal(self, head: Head, who: Who) -> AppError | None:
        """The error for a request that is not allowed, else None. `who` may ask for its route. Stores the token's
        session in the scope."""
        if head.header_bytes > MAX_HEADER_BYTES:
            return HeadersTooLarge(f"the headers have {head.header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
        scope = head.scope
        query: bytes = scope["query_string"]
        size = len(scope.get("raw_path") or scope["path"].encode()) + len(query)
        if size > MAX_TARGET_BYTES:
            return TargetTooLong(f"path and query have {size} bytes; the limit is {MAX_TARGET_BYTES}")
        if query and query.count(b"&") >= MAX_PARAMETERS:
            return InvalidRequest(f"the query has more than {MAX_PARAMETERS} parameters")
        return None if who == "anyone" else self._check(head, who)

    def _check_connection(self, head: Head, who: Who) -> AppError | None:
        """Without admin tokens: decide by the connection. Only this machine itself is served, by a loopback address and
        Host, and trusted networks."""
        headers = head.headers
        peer: Address = head.scope["client"]
        server: Address = head.scope["server"]
        hosts = headers.get(b"host", ())
        fault = None
        if self._trusted and self._is_trusted(head):
            pass
        elif head.is_forwarded:
            fault = "the request came through a proxy"
        elif peer is None or server is None or not self._is_loopback(peer[0]):
            fault = "the client's address is not a loopback address"
        elif not self._is_loopback(server[0]):
            fault = "the client did not connect to a loopback address"
        elif len(hosts) != 1 or not _LOOPBACK_HOST.fullmatch(hosts[0]):
            fault = "the Host header is not that of a loopback address"
        if fault is not None:
            return Forbidden(
                f"{fault}, and without TURNLOG_ADMIN_TOKEN only requests from this machine are served: set a "
                "token, or name the client's network in TURNLOG_TRUSTED_NETWORKS"
            )
        if (b"origin" in headers or b"sec-fetch-site" in headers) and _is_foreign(headers):
            # A link elsewhere may lead to the page; what the page loads, it loads itself.
            if who == "browser" and head.method in _READS and not head.path.startswith("/ui/static/"):
                return None
            return Forbidden(
                "a page of another site sent this request: it is refused while TURNLOG_ADMIN_TOKEN is not set"
            )
        return None

    def _is_trusted(self, head: Head) -> bool:
        """Is the peer's address in a trusted network? No if only a proxy's header tells the address."""
        state = head.scope.get("state") or {}
        if PEER not in state and head.is_forwarded:
            return False
        peer: Address = state[PEER] if PEER in state else head.scope["client"]
        return peer is not None and len(peer[0]) <= _MAX_ADDRESS and self._is_in_trusted_network(peer[0])

    def _is_in_trusted(self, host: str) -> bool:
        address = _address(host)
        return address is not None and any(address in network for network in self._trusted)

    def _check_token(self, head: Head, who: Who) -> AppError | None:
        """With admin tokens: decide by the request's token or cookie."""
        headers = head.headers
        if who == "browser":
            is_refused = head.method not in _READS and _is_foreign(headers)
            return Forbidden("another site's page sent this") if is_refused else None
        token = _token(headers)
        if token is None:
            return None if self._is_signed_in(head, who) else Unauthorized("this request needs a bearer token")
        if isinstance(token, AppError):
            return token
        if self._tokens.is_admin(token):
            return None
        token_session = self._tokens.session_of(token)
        if token_session is None:
            run_token = self._tokens.run_of(token)
            if run_token is None:
                return Unauthorized(UNKNOWN_TOKEN)
            head.run_token = run_token
            return None
        head.scope[TOKEN_SESSION] = token_session
        if head.path.startswith(_SESSIONS) and head.path_session != token_session:
            return unknown_session(head.path_session or "")
        if who != "session":
            return Forbidden(
                "this route needs the admin token: a session token is only valid for its own session's routes"
            )
        return None

    def _is_signed_in(self, head: Head, who: Who) -> bool:
        """Does the page's cookie allow the request?"""
        headers = head.headers
        if b"cookie" not in headers or _is_foreign(headers):
            return False
        reads = head.method in _READS and who != "admin"
        writes = head.method in ("PUT", "DELETE") and _ANNOTATIONS.fullmatch(head.path)
        if not reads and not (writes and _is_sent_by_page(headers)):
            return False
        now = self._clock()
        for cookie in _cookies(headers[b"cookie"]):
            if self._tokens.is_signed_in(cookie, now):
                return True
            if (run_token := self._tokens.run_signed_in(cookie, now)) is not None:
                head.run_token = run_token
                return True
        return False


async def to_newest(app: Services, head: Head) -> None:
    """Let the path of a request that is no turn's name the session that it asks for: the newest that has the name, or
    with `?generation=` an earlier one. A session's token is that of one generation. Raises AppError."""
    name = head.path_session
    if name is None or not _ID.fullmatch(name):
        return
    run = head.run
    if TOKEN_SESSION in head.scope:
        if run is not None:
            await app.names.require_run(name, run)
        return
    number = generation_in(head)
    session_id = await app.names.of_path(run, name) if number is None else await app.names.require(run, name, number)
    if session_id != name or number is not None:
        path: str = head.scope["path"]
        base = path[: len(path) - len(route_path(head.scope))]
        query = b"&".join(part for part in head.scope["query_string"].split(b"&") if not part.startswith(GENERATION))
        head.scope = {**head.scope, "path": f"{base}/sessions/{session_id}{head.route}", "query_string": query}
        head.path_session = head.session_id = session_id


def generation_in(head: Head) -> int | None:
    """The generation that the query asks for, or None. Raises InvalidRequest."""
    parts = head.scope["query_string"].split(b"&")
    given = next((part.removeprefix(GENERATION) for part in parts if part.startswith(GENERATION)), None)
    if given is None:
        return None
    if re.fullmatch(rb"[1-9][0-9]{0,8}", given) is None:
        raise InvalidRequest("generation must be a number from 1")
    return int(given)


def unknown_session(session_id: str) -> SessionNotFound:
    """The error for a session that does not exist, and for another token's session: a client cannot tell them apart."""
    return invalid_session_id(session_id) or SessionNotFound(f"session {session_id} does not exist")


def invalid_session_id(session_id: str) -> SessionNotFound | None:
    """The error for what cannot be the id of a session."""
    return None if _ID.fullmatch(session_id) else SessionNotFound("the session id is invalid")


def _token(headers: AuthHeaders) -> bytes | Unauthorized | None:
    """The request's token; None if it brings none."""
    bearers, keys = headers.get(b"authorization", []), headers.get(b"x-api-key", [])
    tokens = {key.strip(b" \t") for key in keys}
    for value in bearers:
        scheme, _, token = value.partition(b" ")
        tokens.add(token.strip(b" \t") if scheme.lower() == b"bearer" else b"")
    if len(bearers) > 1 or len(keys) > 1 or b"" in tokens:
        return Unauthorized("expected one Authorization header with a bearer token, or one x-api-key")
    if len(tokens) > 1:
        return Unauthorized("Authorization and x-api-key hold different tokens: send one of them, or the same in both")
    return tokens.pop() if tokens else None


def _is_foreign(headers: AuthHeaders) -> bool:
    """Did a browser send this for a page of another site? Browsers set these headers, and pages cannot change them."""
    sites = headers.get(b"sec-fetch-site")
    if sites is not None:
        return any(site not in (b"same-origin", b"none") for site in sites)
    own = headers.get(b"host", [b""])[0].lower()
    return any(origin.partition(b"://")[2].lower() != own for origin in headers.get(b"origin", ()))


def _is_sent_by_page(headers: AuthHeaders) -> bool:
    """Does the request prove that a page of this server sent it? Unlike `_is_foreign`, absent marks prove nothing."""
    if headers.get(PAGE_HEADER) != [b"1"]:
        return False
    sites, origins = headers.get(b"sec-fetch-site", []), headers.get(b"origin", [])
    if sites:  # else an old browser, or one that does not trust the connection: plain HTTP
        return sites == [b"same-origin"]
    own = headers.get(b"host", [b""])[0].lower()
    return len(origins) == 1 and origins[0].partition(b"://")[2].lower() == own != b""


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The parsed address, or None if invalid. An IPv4 address mapped to IPv6 is returned as IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _cookies(headers: Sequence[bytes]) -> list[bytes]:
    """The values of all cookies with the page's cookie name."""
    pairs = [pair.strip().partition(b"=") for header in headers for pair in header.split(b";")]
    return [value for name, _, value in pairs if name == COOKIE]
