"""How routes under `/ui/api` are described, and what they answer with.

They belong to the page, and may change with it.
"""

from __future__ import annotations

import msgspec
from fastapi import Response

from app.api.describe import ANYTHING, JSON, READ, SESSION, Reply, describe
from app.errors import InvalidRequest, NotFound

MAX_PAGE = 500
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

for_the_page = describe(
    "For the page",
    "page",
    Reply("The view's data.", {JSON: ANYTHING}),
    errors=(InvalidRequest, NotFound, *SESSION, *READ),
)


def page_reply(view: object) -> Response:
    """Encode with msgspec: FastAPI would first convert a whole session into Python objects."""
    return Response(msgspec.json.encode(view), media_type="application/json", headers=HEADERS)
