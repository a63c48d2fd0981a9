"""The options of the keeper and its servers, and how their processes are started."""

from __future__ import annotations

import json
import os
import sys
from typing import NamedTuple

from turnlog.server_code import PACKAGE

BACKLOG = 4096
"""Connections that may wait to be accepted; `net.core.somaxconn` may allow fewer."""


class ServeOptions(NamedTuple):
    """Passed on the command line. `sockets` are listening descriptors, `host` and `port` their address for the log;
    `servers` run at a time, without the spare. A stop waits `stop_s` seconds for open requests."""

    sockets: tuple[int, ...]
    host: str
    port: int
    servers: int
    stop_s: int

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def from_json(text: str) -> ServeOptions:
        read = ServeOptions(**json.loads(text))
        return read._replace(sockets=tuple(read.sockets))


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this package as it is here, with this interpreter.

    Without `-P` Python would import a `turnlog.py` of the working folder; only in the checkout is that ours.
    """
    is_checkout = not sys.flags.safe_path and os.path.samefile(os.curdir, PACKAGE.parent)
    return [sys.executable, *([] if is_checkout else ["-P"]), "-m", module, *arguments]
