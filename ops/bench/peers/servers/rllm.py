"""rllm-model-gateway, which writes a trace in the background after the reply, or before it with `sync_traces`."""

from __future__ import annotations

import json

import httpx

from ops.bench.client import Connection
from ops.bench.load import Session, open_session
from ops.bench.peers.protocol import Peer, PeerProcess, Place, Record


class Gateway(Peer):
    requirements = ("rllm-model-gateway==0.1.0",)

    def __init__(self, name: str, store: str, sync_traces: bool = False) -> None:
        self.name = name
        self._settings = {"store_worker": store, "sync_traces": sync_traces}

    def process(self, place: Place) -> PeerProcess:
        path = place.folder / "gateway.yaml"
        command = [str(place.python), "-m", "rllm_model_gateway", "--config", str(path)]
        process = PeerProcess(command, place)
        settings = {
            "host": "127.0.0.1",
            "port": process.port,
            "workers": [{"url": place.engine_url}],
            "db_path": str(place.folder / "gateway.db"),
            "log_level": "WARNING",
        }
        path.write_text(json.dumps(settings | self._settings))  # JSON is valid YAML
        return process

    async def open(self, connection: Connection, name: str) -> Session:
        return await open_session(connection, name)  # its route and body are Turnlog's

    async def records(self, client: httpx.AsyncClient, session: Session) -> list[Record]:
        reply = await client.get(f"/sessions/{session.id}/traces")
        return [
            Record(trace["completion_token_ids"], trace["logprobs"], trace["prompt_token_ids"])
            for trace in reply.raise_for_status().json()
        ]
