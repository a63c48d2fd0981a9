"""The servers that the benchmark knows."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping

import httpx
from safetensors.numpy import load

from ops.bench.client import Connection
from ops.bench.load import Session, open_session
from ops.bench.peers.protocol import NotInstalled, Peer, PeerProcess, Place, Record, by_mask
from ops.bench.primary import primary
from ops.server import PORT, ROOT, KeptServer, OwnProcess
from ops.simulator import tokenizer_files
from ops.simulator.process import SimulatorProcess


class EngineAlone(Peer):
    """The engine stand-in without a server before it, on the servers' core."""

    name = "engine"

    def process(self, place: Place) -> SimulatorProcess:
        return SimulatorProcess("--dialect", self.dialect, "--reasoning", "0")

    async def open(self, connection: Connection, name: str) -> Session:
        return Session(name, "")


class LiteLLM(Peer):
    """LiteLLM as a plain proxy: it records nothing that a trainer could use."""

    name = "litellm"
    requirements = ("litellm[proxy]==1.108.7",)
    health = "/health/liveliness"

    def process(self, place: Place) -> PeerProcess:
        path = place.folder / "litellm.yaml"
        engine = {"model": "hosted_vllm/simulator", "api_base": f"{place.engine_url}/v1", "api_key": "none"}
        settings = {
            "model_list": [{"model_name": name, "litellm_params": engine} for name in ("simulator", "m")],
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        path.write_text(json.dumps(settings))
        command = [str(place.python.with_name("litellm")), "--config", str(path), "--host", "127.0.0.1"]
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        return PeerProcess([*command, "--port", PORT], place, health=self.health, environment=environment)

    async def open(self, connection: Connection, name: str) -> Session:
        return Session(name, "")


_START = """
import sys
from argparse import Namespace
from miles.rollout.session.server import run_session_server
try:
    from miles.rollout.session.config import compute_session_server_config
except ModuleNotFoundError:
    compute_session_server_config = None
version, port, tokenizer, engine = sys.argv[1:]
host, port = "127.0.0.1", int(port)
hooks = "miles.rollout.session.v2."
given = Namespace(
    use_session_server=version,
    session_server_ip=host,
    session_server_port=port,
    miles_router_timeout=600.0,
    hf_checkpoint=tokenizer,
    chat_template_path=None,
    apply_chat_template_kwargs=None,
    tito_model="qwen3",
    use_rollout_routing_replay=False,
    use_rollout_indexer_replay=False,
    sglang_speculative_algorithm=None,
    recompute_logprobs_via_prefill=False,
    save_debug_trajectory_data=None,
    lora_rank=0,
    lora_adapter_path=None,
    session_sample_picker_path=hooks + "picker_hub.drop_retries",
    session_sample_postprocessor_path=hooks + "postprocessor_hub.default_postprocess",
)
if compute_session_server_config is None:
    run_session_server(given, engine)
else:
    run_session_server(
        compute_session_server_config(given, host=host, port=port, instance_id="0", backend_url=engine)
    )
"""


class Miles(Peer):
    """The session server of radixark/miles, its versions 1 and 2, from a checkout.

    It is started by its own entry point, which a trainer's driver calls, with the arguments that the driver has by
    default; where the driver starts several instances, this is one, and a session stays at one. It renders prompts
    itself and sends the engine ids, so it is given the tokenizer of the stand-in.
    """

    requirements = (
        *("torch==2.14.1", "torchvision==0.29.1", "ray==2.60.0", "transformers==5.12.1", "safetensors==0.8.0"),
        *("fastapi", "uvicorn", "httpx", "setproctitle", "pybase64", "orjson", "psutil", "pillow", "msgspec"),
        *("pyzmq", "ipython", "aiohttp", "openai", "triton"),
    )
    bare = ("sglang==0.5.16",)
    """The release that miles names; of all its requirements the session server imports those above."""
    needs_checkout = True
    dialect = "sglang"

    def __init__(self, version: str) -> None:
        self.name = f"miles-{version}"
        self._version = version

    def process(self, place: Place) -> PeerProcess:
        if place.checkout is None or not (place.checkout / "miles" / "rollout" / "session" / "server.py").exists():
            raise NotInstalled("its checkout has no miles/rollout/session/server.py")
        tokenizer = place.folder / "tokenizer"
        if not tokenizer.exists():
            tokenizer_files.write(tokenizer)
        command = [str(place.python), "-c", _START, self._version, PORT, str(tokenizer), place.engine_url]
        return PeerProcess(command, place, environment={"PYTHONPATH": str(place.checkout)})

    async def open(self, connection: Connection, name: str) -> Session:
        created = await connection.json("POST", "/sessions")
        return Session(created["session_id"], f"/sessions/{created['session_id']}")

    async def records(self, client: httpx.AsyncClient, session: Session) -> list[Record]:
        reply = await client.post(f"{session.root}/samples", json={})
        if reply.status_code == 404:
            return []
        tensors = load(reply.raise_for_status().content)
        records = []
        for number in range(len(json.loads(tensors["_samples_meta"].tobytes())["samples"])):
            ids, mask, logprobs = (
                tensors[f"{field}.{number}"].tolist() for field in ("tokens", "loss_mask", "rollout_log_probs")
            )
            prompt = [None] * (len(ids) - len(mask))
            records += by_mask(ids, [*prompt, *logprobs], [*prompt, *mask])
        return records


class Gateway(Peer):
    """rllm-model-gateway, which writes a trace in the background after the reply, or before it with `sync_traces`.

    It is what PyPI has, or with a checkout of rllm that one's, on PyPI's requirements.
    """

    requirements = ("rllm-model-gateway==0.1.0",)

    def __init__(self, name: str, store: str, sync_traces: bool = False) -> None:
        self.name = name
        self._settings = {"store_worker": store, "sync_traces": sync_traces}

    def process(self, place: Place) -> PeerProcess:
        path = place.folder / "gateway.yaml"
        command = [str(place.python), "-m", "rllm_model_gateway", "--config", str(path)]
        newer = {} if place.checkout is None else {"PYTHONPATH": str(place.checkout / "rllm-model-gateway" / "src")}
        process = PeerProcess(command, place, environment=newer)
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


class Turnlog(Peer):
    """Turnlog of this checkout, as `turnlog serve` starts it."""

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


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        EngineAlone(),
        Turnlog("turnlog-sqlite"),
        Turnlog("turnlog-postgres", postgres=True),
        Gateway("rllm-memory", "memory"),
        Gateway("rllm-sqlite", "sqlite"),
        Gateway("rllm-sqlite-sync", "sqlite", sync_traces=True),
        Miles("v1"),
        Miles("v2"),
        LiteLLM(),
    )
}
"""By name, in the order of the table."""
