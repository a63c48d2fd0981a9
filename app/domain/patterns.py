"""What texts and numbers of a request may be: regular expressions as a schema has them, and bounds."""

from __future__ import annotations

import base64
import math
import re
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

ID = r"^[A-Za-z0-9._:-]{1,128}$"
"""Of a session, of an affinity, of a consumer. For `re.fullmatch`: `$` alone lets a line feed follow."""

ALL_RUNS = "*"
"""Stands for a run where all of them are meant."""

RUN_OR_ALL = rf"{ID}|^\*$"


def is_id(text: str) -> bool:
    """An id that is not only dots: a client may take those for a relative path."""
    return re.fullmatch(ID, text) is not None and text.strip(".") != ""


NO_NUL = r"^[^\x00]*$"
"""PostgreSQL's text holds no NUL."""

ANNOTATION = r"^[A-Za-z0-9_-]{1,64}$"
"""Of an annotation's name: it is part of a Parquet column's and a tensor's."""

TAG = r"^[^\x00-\x1f\x7f]{1,128}$"
"""Of a session's tag: no control characters. For `re.fullmatch`, as `ID`."""

MAX_INTEGER = 2**63 - 1
"""What a database's integer holds."""

MAX_FLOAT32 = 3.4028234663852886e38
"""Trainers keep rewards in 32 bits."""


def is_in_row(value: object) -> bool:
    """Can every container of an export hold the number: an integer of 64 bits, or a finite double?"""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return not isinstance(value, float) or math.isfinite(value)


MAX_LENGTH = 2048


def plain_base_url(text: str) -> str:
    """The URL without a trailing slash and the `/v1` that OpenAI's clients need, so that equal URLs compare equal."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def base_url_fault(url: str, *, may_have_query: bool = False) -> str | None:
    """What is accepted instead, as text that follows "base URLs"; None for a valid URL."""
    wanted = "such as http://127.0.0.1:30000"
    if not url.isprintable() or " " in url or "\\" in url or len(url) > MAX_LENGTH:
        return wanted
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for one that is out of range
        (parts.hostname or "").encode("idna")
    except ValueError:
        return wanted
    # An empty query or fragment too: a path that is added behind it would become part of it.
    if parts.scheme not in ("http", "https") or not parts.hostname or "#" in url:
        return wanted
    if "?" in url and not may_have_query:
        return wanted
    if "@" in parts.netloc:
        return "without credentials (use TURNLOG_UPSTREAM_API_KEY)"
    return None


def webhook_key(secret: str) -> bytes:
    """The key of a webhooks' secret, `whsec_` and 24 to 64 bytes in base64. Raises ValueError."""
    key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError("another prefix, or too few or too many bytes")
    return key


_FORM = re.compile(r"(?:(https?)://)?(?:\[([0-9a-f:.]+)\]|([a-z0-9*._-]+))(/[0-9]{1,3})?(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}


class AddressPattern(NamedTuple):
    """An address that a router's list of workers may name (TURNLOG_ROUTER_WORKERS). `host`: a network, or what a host's
    name is like. None: any scheme, any port."""

    scheme: str | None
    host: IPv4Network | IPv6Network | re.Pattern[str]
    port: int | None

    def matches(self, url: str) -> bool:
        """Is it the address of this valid base URL?"""
        parts = urlsplit(url)
        if self.scheme not in (None, parts.scheme) or self.port not in (None, parts.port or _PORTS[parts.scheme]):
            return False
        host = parts.hostname or ""
        if isinstance(self.host, re.Pattern):
            return self.host.fullmatch(host) is not None
        try:
            return ip_address(host) in self.host
        except ValueError:
            return False


def address_pattern(text: str) -> AddressPattern:
    """`[scheme://]host[:port]`, where the host is an address, a network, or a name in which `*` stands for any
    characters but dots, and not in its last label: `10.0.0.*` would also be a name that anyone can register, and `*` a
    number that stands for an address.

    Raises ValueError.
    """
    found = _FORM.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError("it is malformed")
    scheme, bracketed, name, length, port = found.groups()
    number = None if port is None else int(port)
    if number is not None and not 0 < number < 1 << 16:
        raise ValueError("the port is not valid")
    host = bracketed or name
    if bracketed or length or name.rpartition(".")[2].isdigit():
        return AddressPattern(scheme, ip_network(host + (length or "")), number)
    labels = host.split(".")
    if not all(labels) or "*" in labels[-1]:
        raise ValueError("its last label must be spelled out")
    return AddressPattern(scheme, re.compile(r"[^.]*".join(map(re.escape, host.split("*")))), number)
