"""Names of sessions in requests that take no turn: in a path, and in SkyRL's route that finishes one.

A path's name is that of the newest session that has it; `?generation=` leads to an earlier one. With a session's token
it is the token's session: the token is that of one generation.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.types import Receive

from app.api.describe import WRITE, Schema, describe, json_reply
from app.api.direct import DirectRoute
from app.api.head import TOKEN_SESSION, Head, route_path
from app.domain.patterns import ID
from app.errors import AppError, InvalidRequest, Restored, SessionUnreadable
from turnlog import replies as reply_types

if TYPE_CHECKING:
    from app.services import Services

_ID = re.compile(ID)
PARAMETER = b"generation="
"""In a query: which generation of the name in the path."""


async def to_newest(app: Services, head: Head) -> AppError | None:
    """Let the request's path name the session that it asks for. The error if that fails."""
    name = head.path_session
    if name is None or TOKEN_SESSION in head.scope or not _ID.fullmatch(name):
        return None
    try:
        number = generation_in(head)
        session_id = await app.names.newest(name) if number is None else await app.names.require(name, number)
    except AppError as error:
        return error
    if session_id != name or number is not None:
        path: str = head.scope["path"]
        base = path[: len(path) - len(route_path(head.scope))]
        query = b"&".join(part for part in head.scope["query_string"].split(b"&") if not part.startswith(PARAMETER))
        head.scope = {**head.scope, "path": f"{base}/sessions/{session_id}{head.route}", "query_string": query}
        head.path_session = head.session_id = session_id
    return None


def generation_in(head: Head) -> int | None:
    """The generation that the query asks for, or None. Raises InvalidRequest."""
    parts = head.scope["query_string"].split(b"&")
    given = next((part.removeprefix(PARAMETER) for part in parts if part.startswith(PARAMETER)), None)
    if given is None:
        return None
    if re.fullmatch(rb"[1-9][0-9]{0,8}", given) is None:
        raise InvalidRequest("generation must be a number from 1")
    return int(given)


@describe(
    "End a session whose name comes again",
    "admin",
    json_reply(reply_types.Finished, "The session that had the name; without an id, none had."),
    errors=(InvalidRequest, Restored, SessionUnreadable, *WRITE),
)
async def finish_session(app: Services, head: Head, receive: Receive) -> tuple[int, Any]:
    """Close the newest session of a name. The next request that names it in a header, or creates it, begins a new one
    under an id of its own, with the same `name` and the next `generation`. Any other close is for good.

    SkyRL's clients call this at the end of a trajectory. A name that no session has is ignored.
    """
    given = parse_qs(head.scope["query_string"].decode("latin-1"), keep_blank_values=True).get("session_id", [])
    if len(given) != 1 or not _ID.fullmatch(given[0]):
        raise InvalidRequest("session_id must be the name of one session")
    session = await app.names.finish(given[0])
    if session is None:
        return 200, {"session_id": None, "name": given[0], "generation": None}
    return 200, {"session_id": session.session_id, "name": session.name, "generation": session.generation}


_NAME: Schema = {
    "name": "session_id",
    "in": "query",
    "required": True,
    "schema": {"type": "string", "pattern": ID},
    "description": "The session's name, or its id.",
}

DIRECT_ROUTES = (DirectRoute("POST", False, "/finish_session", finish_session, "Sessions", (_NAME,)),)
