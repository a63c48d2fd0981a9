"""Headers that keep a browser from making more of a reply than the data it is."""

from __future__ import annotations

from starlette.types import Message, Send

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
"""What agents and engines said is in these replies, and one that is looked at is in the origin of the page."""


def hardened(send: Send) -> Send:
    """`send`, which adds those headers that a reply does not have: the page's own files say something else."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            message = {**message, "headers": [*given, *(one for one in HEADERS if one[0] not in names)]}
        await send(message)

    return sending
