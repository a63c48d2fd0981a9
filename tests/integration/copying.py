"""What tests of backups share: commands on a server's store, clients that write meanwhile, what must not be lost."""

from __future__ import annotations

import hashlib
import re
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from helpers.databases import run_module

from app.store.database import Database
from app.store.dialect import StorePoints
from integration.stand import Stand, Talk
from ops.verify import Acknowledged, Report, verify


def command(
    stand: Stand, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`turnlog` with these arguments."""
    return run_module("turnlog.cli", *arguments, environment={**stand.server.environment, **(environment or {})})


def failure(stand: Stand, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """The one line with which a command says that nothing could be done."""
    done = command(stand, *arguments, environment=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


class Writers:
    """Clients that take turns until told to stop, and remember what they were told is on disk."""

    def __init__(self, stand: Stand, count: int) -> None:
        self._stop = threading.Event()
        self.held: list[Acknowledged] = []
        talks = [stand.talk(group_id="writers") for _ in range(count)]
        self._runs: list[Future[Any]] = [stand.meanwhile(self._run, talk) for talk in talks]

    def _run(self, talk: Talk) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            body = talk.say(f"Question {number}").content
            self.held.append(Acknowledged(talk.id, number, hashlib.sha256(body).hexdigest()))

    def stop(self) -> list[Acknowledged]:
        self._stop.set()
        for run in self._runs:
            run.result(60)
        return self.held


async def checked(url: str, held: list[Acknowledged]) -> Report:
    database = Database(url, points=StorePoints())
    try:
        return await verify(database, held)
    finally:
        await database.close()


def url_of(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


def exported(stand: Stand) -> tuple[bytes, bytes]:
    """The bytes of an export with Turnlog's rows and a trainer's, but for the cursors, which name the store's epoch."""

    def of(shape: str) -> bytes:
        response = stand.http.get("/export", params={"shape": shape, "replay": "true"})
        assert response.status_code == 200
        return re.sub(rb'"cursor":"[^"]*"', b'"cursor":""', response.content)

    return of("turnlog"), of("slime")
