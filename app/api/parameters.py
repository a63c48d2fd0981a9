"""Parameters shared by several routes."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Path, Query, Request
from pydantic import BaseModel

from app.domain.patterns import ID, NO_NUL
from app.errors import InvalidRequest, SessionNotFound


async def _well_formed(
    session_id: Annotated[str, Path(description="A session's id.", json_schema_extra={"pattern": ID})],
) -> str:
    """Raises SessionNotFound for an invalid id, without a look into the database."""
    if not re.fullmatch(ID, session_id):
        raise SessionNotFound("the session id is invalid")
    return session_id


SessionId = Annotated[str, Depends(_well_formed)]

PageCursor = Annotated[
    str | None, Query(pattern=NO_NUL, description="Where to continue: the cursor of an earlier reply.")
]

LIMIT = "Maximum number of items."


def require_known(request: Request, model: type[BaseModel]) -> None:
    """Raises InvalidRequest for an unknown parameter: a misspelt filter would filter nothing."""
    for name in request.query_params:
        if name not in model.model_fields:
            accepted = ", ".join(sorted(model.model_fields))
            raise InvalidRequest(f"{name} is not a parameter of {request.url.path}; supported are {accepted}")
