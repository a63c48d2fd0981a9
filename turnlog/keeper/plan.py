"""What the keeper and its servers are told on their command lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

BACKLOG = 4096
"""Connections that wait to be accepted, while nobody serves and otherwise; `net.core.somaxconn` may allow fewer."""


class Plan(NamedTuple):
    """`sockets` are descriptors that listen; `host` and `port` are what the log says of them. So many `servers` serve
    at a time. A stop waits `stop_s` seconds for open requests."""

    sockets: tuple[int, ...]
    host: str
    port: int
    servers: int
    stop_s: int

    def text(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def read(text: str) -> Plan:
        read = Plan(**json.loads(text))
        return read._replace(sockets=tuple(read.sockets))


def command(module: str, *arguments: str) -> list[str]:
    """Run a module of this package with this interpreter, and with the code that runs here.

    The folder where it is started is not looked at: somebody's `app` may lie there.
    """
    from_here = bool(sys.path) and not sys.flags.safe_path and Path(sys.path[0] or os.curdir).resolve() == ROOT
    return [sys.executable, *([] if from_here else ["-P"]), "-m", module, *arguments]
