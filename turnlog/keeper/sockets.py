"""The sockets to listen at: bound here, or handed over by systemd (`sd_listen_fds(3)`)."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from turnlog.keeper.options import BACKLOG

FIRST = 3
"""systemd's first descriptor."""

VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class CannotListen(Exception):
    """Its message says where, and why not."""


class Listening(NamedTuple):
    """The sockets, and their address for messages."""

    sockets: list[socket.socket]
    host: str
    port: int


def open_sockets(host: str, port: int) -> Listening:
    """systemd's sockets where there are any, or else one for each address of `host`. Raises CannotListen."""
    sockets = from_systemd()
    if sockets:
        return Listening(sockets, *sockets[0].getsockname()[:2])
    sockets = bind(host, port)
    return Listening(sockets, host, sockets[0].getsockname()[1])


def from_systemd() -> list[socket.socket]:
    """What systemd has bound for this process. The variables are removed: they are not for child processes."""
    given = {name: os.environ.pop(name, "") for name in VARIABLES}
    if given["LISTEN_PID"] != str(os.getpid()) or not given["LISTEN_FDS"].isdecimal():
        return []
    found = [_adopt(FIRST + number) for number in range(int(given["LISTEN_FDS"]))]
    for one in found:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or not one.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            raise CannotListen("the socket unit: accepted is ListenStream= with an address and a port, and Accept=no")
    return found


def _adopt(descriptor: int) -> socket.socket:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotListen(f"LISTEN_FDS: descriptor {descriptor} is no socket: {error.strerror}") from error
    found.set_inheritable(False)
    return found


def bind(host: str, port: int) -> list[socket.socket]:
    """Port 0: one that is free, the same for all addresses. Raises CannotListen."""
    made: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            made.append(socket.socket(family, socket.SOCK_STREAM))
            _listen(made[-1], (address, made[0].getsockname()[1] or port))
    except OSError as error:
        for one in made:
            one.close()
        raise CannotListen(f"cannot listen at {host_in_url(host)}:{port}: {error.strerror or error}") from error
    return made


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _listen(one: socket.socket, address: tuple[str, int]) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    one.bind(address)
    one.listen(BACKLOG)


def host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
