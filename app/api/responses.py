"""The routes that read a stored response of OpenAI's Responses API: it is rendered again from its turn."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from app.api.head import unknown_session
from app.api.header_sessions import session_of_request
from app.api.of_run import require_own
from app.api.parameters import LIMIT, SessionId
from app.api.replies import rendered
from app.api.requests import Request
from app.api.routes import ANYTHING, JSON, READ, SESSION, Reply, Routes
from app.domain.session import Turn
from app.domain.split import ITEMS
from app.errors import InvalidRequest, NotFound, RunMismatch, SessionNotFound, SessionUnreadable
from app.protocols.base import CommittedReply
from app.protocols.registry import PROTOCOLS
from app.protocols.responses.items import response_proof
from app.protocols.responses.reply import Order, input_items, read_echo
from app.services import Services
from app.sessions import transcript
from app.sessions.cache import CacheEntry, require_open

route = Routes("Turns")

ResponseId = Annotated[str, Path(description="A response's id, as its reply gave it.")]

ERRORS = (*SESSION, *READ, NotFound, SessionUnreadable)
_IN_PATH = "/sessions/{session_id}/v1/responses/{response_id}"
_BY_HEADER = "/v1/responses/{response_id}"
_RESPONSE = Reply("The response, as its request was answered.", {JSON: ANYTHING})
_ITEMS = Reply("A page of the input items of the response's request.", {JSON: ANYTHING})


class ItemsQuery(BaseModel):
    """Which items, as OpenAI's API names its parameters; others of its own are ignored."""

    order: Order = Field(default="desc", description="`desc`: the newest first.")
    limit: int = Field(default=20, ge=1, le=100, description=LIMIT)
    after: str | None = Field(
        default=None, pattern="^[A-Za-z0-9_-]{1,128}$", description="The id of the item that the page follows."
    )


@route(f"GET {_IN_PATH}", "A stored response", "session", _RESPONSE, errors=ERRORS, of_run="session")
async def get_response(request: Request, session_id: SessionId, response_id: ResponseId) -> Response:
    """A response of the session, also after a restart; 404 if it was made with `store: false`."""
    app = request.services
    entry, turn, proof, echo = await _stored(app, session_id, response_id)
    _, _, body = await transcript.stored_reply(app.database, entry.session, turn.number, ())
    reply = CommittedReply(body, proof, echo, turn.given_ids)
    return Response(await rendered(len(body), lambda: PROTOCOLS["responses"].reply(reply)), media_type=JSON)


@route(
    f"GET {_BY_HEADER}",
    "A stored response of the session that a header or token names",
    "session",
    _RESPONSE,
    errors=(InvalidRequest, *ERRORS),
    of_run="header",
)
async def get_response_by_header(request: Request, response_id: ResponseId) -> Response:
    """As with the session in the path."""
    return await get_response(request, await _session_of(request), response_id)


@route(
    f"GET {_IN_PATH}/input_items",
    "The input items of a stored response",
    "session",
    _ITEMS,
    errors=(InvalidRequest, *ERRORS),
    of_run="session",
)
async def get_input_items(
    request: Request, session_id: SessionId, response_id: ResponseId, query: Annotated[ItemsQuery, Query()]
) -> Response:
    """The whole history that the response answered, as input items."""
    app = request.services
    entry, turn, proof, echo = await _stored(app, session_id, response_id)
    history = b"[" + await app.cache.messages(entry, turn.number) + b"]"

    def listed() -> bytes:
        return input_items(ITEMS.decode(history)[:-1], proof, echo, query.order, query.limit, query.after)

    return Response(await rendered(len(history), listed), media_type=JSON)


@route(
    f"GET {_BY_HEADER}/input_items",
    "As above, of the session that a header or token names",
    "session",
    _ITEMS,
    errors=(InvalidRequest, *ERRORS),
    of_run="header",
)
async def get_input_items_by_header(
    request: Request, response_id: ResponseId, query: Annotated[ItemsQuery, Query()]
) -> Response:
    """As with the session in the path."""
    return await get_input_items(request, await _session_of(request), response_id, query)


async def _session_of(request: Request) -> str:
    """The session in which the same headers generate. Raises InvalidRequest, SessionNotFound."""
    app, run = request.services, request.head.token_run
    session = session_of_request(request.headers.items(), b"", request.token_session, request.head.run)
    if run is None:
        return await session.existing(app)
    try:
        session_id = await session.existing(app)
        await require_own(app, session_id, run)
    except (RunMismatch, SessionNotFound) as error:
        raise unknown_session(session.name) from error
    return session_id


async def _stored(app: Services, session_id: str, response_id: str) -> tuple[CacheEntry, Turn, str, bytes | None]:
    """The turn that the id names, with its proof and its echo. Raises NotFound, SessionNotFound, SessionClosed."""
    entry = require_open(await app.cache.current(session_id), session_id)
    proof = response_proof(response_id)
    number = None if proof is None else app.proofs.turn_of(session_id, proof)
    turn = None if number is None else entry.session.turns.get(number)
    if proof is None or turn is None or turn.protocol != PROTOCOLS["responses"].name:
        raise NotFound(f"session {session_id} has no such response")
    echo = await transcript.echo(app.database, entry.session, turn)
    if not read_echo(echo).is_stored:
        raise NotFound(f"the response of turn {turn.number} cannot be retrieved: its request had store: false")
    return entry, turn, proof, echo
