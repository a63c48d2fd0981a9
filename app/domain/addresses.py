"""Patterns of the addresses that a router's list of workers may name, as TURNLOG_ROUTER_WORKERS has them."""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

_FORM = re.compile(r"(?:(https?)://)?(?:\[([0-9a-f:.]+)\]|([a-z0-9*._-]+))(/[0-9]{1,3})?(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}


class AddressPattern(NamedTuple):
    """`host`: a network, or what a host's name is like. None: any scheme, any port."""

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
        raise ValueError("it has another form")
    scheme, bracketed, name, length, port = found.groups()
    number = None if port is None else int(port)
    if number is not None and not 0 < number < 1 << 16:
        raise ValueError("there is no such port")
    host = bracketed or name
    if bracketed or length or name.rpartition(".")[2].isdigit():
        return AddressPattern(scheme, ip_network(host + (length or "")), number)
    labels = host.split(".")
    if not all(labels) or "*" in labels[-1]:
        raise ValueError("its last label must be spelled out")
    return AddressPattern(scheme, re.compile(r"[^.]*".join(map(re.escape, host.split("*")))), number)
