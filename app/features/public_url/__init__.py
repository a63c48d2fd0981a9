"""The server's public address, set while it runs: `turnlog expose` does it for a forwarder.

    routes                 `PUT`, `GET` and `DELETE /public-url`
    creating a session     answers a `url` below it   (`Services.public_url`)

It is an event of the fleet's log with a lease (`domain.fleet`), so every process knows it at once, and that of an
`expose` that was killed ends by itself. Without this feature the setting `TURNLOG_PUBLIC_URL` alone counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.services import Services


def entries() -> list[Route]:
    from app.features.public_url.routes import route

    return route.entries


def add_to(services: Services) -> None:
    fleet = services.fleet

    def current() -> str | None:
        given = fleet.fleet.public_url
        return services.settings.public_url if given is None or fleet.left(given) <= 0 else given.url

    services.public_url = current
