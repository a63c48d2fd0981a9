"""The engine stand-in without a server before it, on the servers' core."""

from __future__ import annotations

from ops.bench.client import Connection
from ops.bench.load import Session
from ops.bench.peers.protocol import Peer, Place
from ops.simulator.process import SimulatorProcess


class EngineAlone(Peer):
    name = "engine"

    def process(self, place: Place) -> SimulatorProcess:
        return SimulatorProcess("--dialect", self.dialect, "--reasoning", "0")

    async def open(self, connection: Connection, name: str) -> Session:
        return Session(name, "")
