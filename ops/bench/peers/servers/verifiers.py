"""verifiers' interception server, which is not run: what it needs, the stand-in does not have."""

from __future__ import annotations

from ops.bench.client import Connection
from ops.bench.load import Session
from ops.bench.peers.protocol import NotInstalled, Peer, PeerProcess, Place


class Verifiers(Peer):
    name = "verifiers"

    def process(self, place: Place) -> PeerProcess:
        """Read in 0.4.0: `InterceptionServer.register` opens a session, `TrainClient` records ids. Raises
        NotInstalled."""
        raise NotInstalled(
            "0.4.0 has no route that opens or reads a session, its rollout does so inside the process; ids and "
            "logprobs come only from vLLM's /inference/v1/generate, from chat it records text"
        )

    async def open(self, connection: Connection, name: str) -> Session:
        raise NotImplementedError
