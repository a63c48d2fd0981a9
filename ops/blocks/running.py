"""Says in the bucket which runs are under way, so that no run deletes blocks that another one needs.

Each run first says that it is there, and then looks for the others, so of two that meet at least one sees the other. A
backup does not begin while another run deletes, and no run deletes while a backup is being made. What a killed run
left is passed over after some time, by the bucket's own clock.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

from app.errors import StartupError
from ops.blocks.bucket import Bucket

Kind = Literal["backup", "prune"]

FOLDER = "running/"

VALID = {"backup": timedelta(hours=24), "prune": timedelta(minutes=10)}
"""How long a run is taken to be under way after it last said so."""

RENEWED_S = 60.0
"""How often a run says so."""


class Run:
    """This run. `others` names those of one kind that are under way."""

    def __init__(self, bucket: Bucket, kind: Kind) -> None:
        self._bucket = bucket
        self._kind = kind
        self.name = f"{FOLDER}{kind}-{secrets.token_hex(8)}"
        self._say()

    def _say(self) -> None:
        self._bucket.put(self.name, f"process {os.getpid()} of {socket.gethostname()}".encode())
        self._said_at = time.monotonic()

    def renew(self) -> None:
        """Say again, if it is time, that this run is under way. Raises StartupError if others may have taken it for
        dead meanwhile: this process was frozen."""
        age = time.monotonic() - self._said_at
        if age > VALID[self._kind].total_seconds() / 2:
            raise StartupError(f"this run stood still for {age:.0f} s: run it again")
        if age > RENEWED_S:
            self._say()

    def others(self, kind: Kind) -> list[str]:
        listed = {one.name: one for one in self._bucket.listed(FOLDER)}
        now = listed[self.name].modified
        return [
            name
            for name, one in listed.items()
            if name.startswith(f"{FOLDER}{kind}-") and name != self.name and now - one.modified < VALID[kind]
        ]

    def forget_dead(self) -> None:
        """Delete what killed runs left."""
        listed = {one.name: one for one in self._bucket.listed(FOLDER)}
        now = listed[self.name].modified
        self._bucket.delete([name for name, one in listed.items() if now - one.modified > max(VALID.values())])

    def end(self) -> None:
        self._bucket.delete([self.name])


@contextmanager
def under_way(bucket: Bucket, kind: Kind) -> Iterator[Run]:
    """Raises StartupError."""
    run = Run(bucket, kind)
    try:
        yield run
    finally:
        run.end()
