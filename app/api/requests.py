"""A request that is no turn's, as its endpoint gets it, and how bodies are read."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import starlette.requests
from pydantic import BaseModel, ValidationError
from starlette.types import Receive

from app.api.head import TOKEN_SESSION, Head
from app.api.limits import read_body
from app.api.of_run import require_run
from app.api.routes import Route
from app.domain.surrogates import mended
from app.errors import ClientGone, Forbidden, InvalidRequest
from app.process import cancelled
from app.request_memory import BodyReservation
from app.services import Services
from app.upstream.headers import Headers
from workers import scan

MAX_LABEL = 64 << 10
"""Maximum bytes as JSON of a session's metadata, and of a reward with its components. They are labels, not data."""

MAX_LOCATION = 200
"""Maximum characters of a location in an error message: a key may be as long as the body."""

MAX_VALUES, MAX_COMPONENTS = 33_000, 11_000
"""Maximum number of values in a body, and in a reward: 64 KiB of JSON cannot hold more."""

SHORT = 16 << 10
"""Bytes up to which a body goes to its model without a check for unknown fields first."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


class Request(starlette.requests.Request):
    """`path_values` are the values of the parameters in the path."""

    def __init__(self, services: Services, route: Route, head: Head, receive: Receive) -> None:
        super().__init__(head.scope, receive)
        self.services = services
        self.route = route
        self.head = head

    @property
    def path_values(self) -> Mapping[str, str]:
        head = self.head
        return head.path_values if head.path_session is None else {**head.path_values, "session_id": head.path_session}

    @property
    def token_session(self) -> str | None:
        """The session whose own token the request brought."""
        return self.scope.get(TOKEN_SESSION)

    async def whole_body(self) -> bytes:
        """The body, at most the route's `largest` bytes; empty if the client disconnects. Raises as `arrived_body`."""
        app = self.services
        limit = min(self.route.largest, app.settings.max_request_bytes)
        with app.inflight.reserve(peer=self.head.peer) as reservation:
            return await arrived_body(self.head, self.receive, self.headers.items(), limit, reservation) or b""

    async def body_of(self, kind: type[Body], most: int = MAX_VALUES) -> Body:
        """The body as a model; an empty one means `{}` if it is optional. Raises as `read_model`, `whole_body`."""
        raw = await self.whole_body()
        body = kind() if self.route.optional_body and not raw.strip() else read_model(raw, kind, most)
        if self.head.token_run is None or self.route.limit != "body":
            return body
        require_run(body.model_dump(include={"run"}, exclude_unset=True).get("run"), self.head.token_run)
        return body.model_copy(update={"run": self.head.token_run})

    def require_judge(self) -> None:
        """Raises Forbidden where a session's token is about to set a reward, to say that the rollout failed or to
        erase content: the agent that is judged may hold it, whose harness does."""
        if self.token_session is not None and self.services.settings.session_rewards == "refuse":
            raise Forbidden(
                "a session token may not set a reward, mark a rollout as failed or erase: use the admin token "
                "or the run's token, or set TURNLOG_SESSION_REWARDS=allow"
            )

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. It is cancelled if the client disconnects first; then ClientGone is raised."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(disconnected(self.receive))
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone("the client disconnected before the reply")
            return working.result()
        finally:
            await cancelled(working, watching)


async def arrived_body(
    head: Head, receive: Receive, headers: Headers, limit: int, reservation: BodyReservation
) -> bytes | None:
    """A body that has come whole is taken as it is; any other is read. As `read_body`."""
    if head.connection is not None and b"content-encoding" not in head.headers:
        body = head.connection.take_body(head.scope, limit)
        if body is not None:
            reservation.hold(len(body))
            return body
    return await read_body(receive, headers, limit, reservation)


async def disconnected(receive: Receive) -> None:
    """Return once the client has disconnected. The rest of its body is dropped."""
    while (await receive())["type"] != "http.disconnect":
        continue


def read_model(raw: bytes, kind: type[Body], most: int = MAX_VALUES) -> Body:
    """Validate a body of any content type. Raises InvalidRequest, which names the first invalid field.

    At most `most` values are allowed: a model reads the whole body on the event loop, with an error per invalid value.
    """
    if scan.may_exceed(raw, most):
        raise InvalidRequest(f"the body has more than {most} values")
    if len(raw) > SHORT:
        _require_known(raw, kind)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        if (text := mended(raw)) is not None:
            return read_model(text.body, kind, most)
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise _unknown(str(first["loc"][0]), kind) from error
        raise InvalidRequest(f"{_location(first['loc'])}: {first['msg']}") from error


def _location(parts: Sequence[str | int]) -> str:
    """The location of a value in a body, as text."""
    return ".".join(str(part) for part in parts)[:MAX_LOCATION] or "the body"


def require_finite(value: Any, *parts: str | int) -> None:
    """Raises InvalidRequest for NaN and infinity. JSON has no such numbers; they would be stored as null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{_location(parts)}: Input should be a finite number")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in inner:
        require_finite(each, *parts, part)


def require_small(what: str, value: Any) -> None:
    """Raises InvalidRequest for more than MAX_LABEL bytes as JSON; its message begins with `what`."""
    size = len(msgspec.json.encode(value))
    if size > MAX_LABEL:
        raise InvalidRequest(f"{what} {size} bytes as JSON; the limit is {MAX_LABEL}")


def _require_known(raw: bytes, kind: type[BaseModel]) -> None:
    """Raises InvalidRequest for the first unknown field. The model would make an error for each of them."""
    try:
        fields = _FIELDS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None and kind.model_config.get("extra") == "forbid":
        raise _unknown(unknown, kind)


def _unknown(name: str, kind: type[BaseModel]) -> InvalidRequest:
    """Names the nearest field, or all of them: a typing error is the usual cause."""
    near = difflib.get_close_matches(name[:64], kind.model_fields, 1)
    known = f"did you mean {near[0]}?" if near else f"supported are {', '.join(sorted(kind.model_fields))}"
    return InvalidRequest(f"{name:.64} is not a field of the body; {known}")
