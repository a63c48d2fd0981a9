"""Turnlog of this checkout, as `turnlog serve` starts it."""

from __future__ import annotations

import json
import os
import signal

import httpx

from ops.bench.client import Connection
from ops.bench.load import Session, open_session
from ops.bench.peers.protocol import Peer, Place, Record, by_mask
from ops.bench.primary import primary
from ops.server import ROOT, KeptServer, OwnProcess


class Turnlog(Peer):
    def __init__(self, name: str, postgres: bool = False) -> None:
        self.name = name
        self._postgres = postgres

    def process(self, place: Place) -> KeptServer:
        url = None
        if self._postgres:
            place.databases.append(place.stack.enter_context(primary(place.folder)).new_database())
            url = place.databases[0].url
        return KeptServer(
            place.folder,
            upstreams=[place.engine_url],
            database_url=url,
            environment={"TURNLOG_UPSTREAM_DIALECT": self.dialect},
            root=place.checkout or ROOT,
        ).migrate()

    def crash(self, process: OwnProcess) -> None:
        """The server is killed, and the supervisor that holds its socket starts the next one."""
        assert isinstance(process, KeptServer)
        os.kill(process.started[-1], signal.SIGKILL)
        process.until_it_answers()

    async def open(self, connection: Connection, name: str) -> Session:
        return await open_session(connection, name)

    async def records(self, client: httpx.AsyncClient, session: Session) -> list[Record]:
        reply = await client.get("/export", params={"session_id": session.id, "shape": "turnlog"})
        rows = [json.loads(line) for line in reply.raise_for_status().content.splitlines()]
        return [record for row in rows for record in by_mask(row["tokens"], row["logprobs"], row["loss_mask"])]
