"""LiteLLM as a plain proxy: it records nothing that a trainer could use."""

from __future__ import annotations

import json

from ops.bench.client import Connection
from ops.bench.load import Session
from ops.bench.peers.protocol import Peer, PeerProcess, Place
from ops.server import PORT


class LiteLLM(Peer):
    name = "litellm"
    requirements = ("litellm[proxy]==1.108.7",)
    health = "/health/liveliness"

    def process(self, place: Place) -> PeerProcess:
        path = place.folder / "litellm.yaml"
        engine = {"model": "hosted_vllm/simulator", "api_base": f"{place.engine_url}/v1", "api_key": "none"}
        settings = {
            "model_list": [{"model_name": "simulator", "litellm_params": engine}],
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        path.write_text(json.dumps(settings))
        command = [str(place.python.with_name("litellm")), "--config", str(path), "--host", "127.0.0.1"]
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        return PeerProcess([*command, "--port", PORT], place, health=self.health, environment=environment)

    async def open(self, connection: Connection, name: str) -> Session:
        return Session(name, "")
