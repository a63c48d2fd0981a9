"""Headers that keep a browser from running or framing the content of a reply."""

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
"""Replies hold text of agents and engines, and a browser that opens one treats it as part of the page's origin."""


def hardened(send: Send) -> Send:
    """`send` that adds those of the headers that a reply does not set; the page's files set their own."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            message = {**message, "headers": [*given, *(one for one in HEADERS if one[0] not in names)]}
        await send(message)

    return sending
