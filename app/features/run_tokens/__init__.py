"""The token of a run: everything within the run, nothing outside.

    routes         `POST` and `DELETE /runs/{run}/token`
    a request      with such a token is checked against the number that the store has   (`Services.run_number`)
    a run's end    ends its token                                                  (`StorePoints.run_ended`)

What a token opens is said in the table of routes (`Route.of_run`), and checked by `app.api.of_run`. Without this
feature no token of a run is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.features.run_tokens import schema as schema

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.run_tokens.run_tokens import TokenNumbers
    from app.services import Services


def entries() -> list[Route]:
    from app.features.run_tokens.routes import route

    return route.entries


def add_to(services: Services) -> TokenNumbers:
    from app.features.run_tokens.run_tokens import TokenNumbers

    made = TokenNumbers(services.database, services.writer, services.tokens)
    services.run_number = made.number_of
    return made
