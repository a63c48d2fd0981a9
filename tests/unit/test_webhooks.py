"""Webhooks: the signature, the pauses, and which addresses are connected to."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from ipaddress import ip_network
from typing import Any

import pytest

from app.domain.patterns import webhook_key
from app.errors import StartupError
from app.features.webhooks.rows import Notice
from app.features.webhooks.sender import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Receiver,
    Undelivered,
    _may_connect,
    pause_s,
    signed,
)
from app.settings import load_settings

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_the_signature_is_that_of_the_published_example() -> None:
    """The example in the tests of Standard Webhooks' libraries."""
    headers = signed([webhook_key(SECRET)], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert dict(headers)["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_pauses_grow_and_end() -> None:
    pauses = [pause_s(failures) for failures in (1, 2, 3, 20, 10_000)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_an_id_is_of_what_happened() -> None:
    first = Notice("group.complete", "1", ("a", 1), "", {})
    others = [("group.complete", "1", ("a", 2)), ("group.complete", "2", ("a", 1)), ("engine.died", "1", ("a", 1))]
    assert first.id == Notice("group.complete", "1", ("a", 1), "later", {"more": 1}).id
    assert len({first.id, *(Notice(*other, "", {}).id for other in others)}) == 4  # type: ignore[arg-type]


@pytest.mark.threat("server-side request by a webhook")
@pytest.mark.parametrize(
    ("host", "leads_to", "networks", "is_told"),
    [
        ("hooks.example.org", "127.0.0.1", (), False),
        ("hooks.example.org", "::ffff:127.0.0.1", (), False),
        ("hooks.example.org", "64:ff9b::7f00:1", (), False),
        ("hooks.example.org", "2002:7f00:1::", (), False),
        ("hooks.example.org", "fec0::1", (), False),
        ("hooks.example.org", "127.0.0.1", ("10.0.0.0/8",), False),
        ("hooks.example.org", "127.0.0.1", ("10.0.0.0/8", "127.0.0.0/8"), True),
        ("127.0.0.1", "127.0.0.1", (), True),
        ("localhost", "127.0.0.1", (), True),
    ],
)
@pytest.mark.anyio
async def test_a_name_leads_to_no_private_address_unless_its_network_is_named(
    monkeypatch: pytest.MonkeyPatch, host: str, leads_to: str, networks: tuple[str, ...], is_told: bool
) -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async def look_up(_: str, port: int, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (leads_to, port))]

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up, raising=False)
    named = tuple(ip_network(network) for network in networks)
    port = server.sockets[0].getsockname()[1]
    receiver = Receiver(f"http://{host}:{port}/a?b=c", partial(_may_connect, networks=named))
    if is_told:
        await receiver.post([], b"{}")
        assert heard[0].startswith(b"POST /a?b=c HTTP/1.1\r\nhost: %b:%d\r\n" % (host.encode(), port))
    else:
        with pytest.raises(Undelivered, match="PermissionError"):
            await receiver.post([], b"{}")
        assert not heard
    await receiver.connections.close()
    server.close()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("WEBHOOKS", "https://a.example/1", "TURNLOG_WEBHOOK_SECRET"),
        ("WEBHOOKS", "https://user:password@a.example/1", "without credentials"),
        ("WEBHOOKS", "https://a.example/1,https://a.example/1", "each once"),
        ("WEBHOOKS", "ftp://a.example/1", "URLs such as"),
        ("WEBHOOKS", "https://a.example/1#run", "filters such as"),
        ("WEBHOOKS", "https://a.example/1#session_id=s", "filters such as"),
        ("WEBHOOKS", "https://a.example/1#metadata=task", "filters such as"),
        ("WEBHOOK_SECRET", "whsec_c2hvcnQ=", "24 to 64 random bytes"),
        ("WEBHOOK_SECRET", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_"),
    ],
)
def test_wrong_settings_are_told_without_secrets(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError) as refused:
        load_settings()
    [line] = refused.value.args
    assert accepted in line
    assert value not in line
