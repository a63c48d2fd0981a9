"""The session server of radixark/miles, its versions 1 and 2, from a checkout.

The server is started by its own entry point, which a trainer's driver calls, with the arguments that the driver has by
default. It renders prompts itself and sends the engine ids, so it is given the tokenizer of the stand-in.
"""

from __future__ import annotations

import json

import httpx
from safetensors.numpy import load

from ops.bench.client import Connection
from ops.bench.load import Session
from ops.bench.peers.protocol import NotInstalled, Peer, PeerProcess, Place, Record, by_mask
from ops.server import PORT
from ops.simulator import tokenizer_files

_START = """
import sys
from argparse import Namespace
from miles.rollout.session.server import run_session_server
version, port, tokenizer, engine = sys.argv[1:]
hooks = "miles.rollout.session.v2."
run_session_server(
    Namespace(
        use_session_server=version,
        session_server_ip="127.0.0.1",
        session_server_port=int(port),
        hf_checkpoint=tokenizer,
        chat_template_path=None,
        tito_model="qwen3",
        sglang_speculative_algorithm=None,
        recompute_logprobs_via_prefill=False,
        save_debug_trajectory_data=None,
        session_sample_picker_path=hooks + "picker_hub.drop_retries",
        session_sample_postprocessor_path=hooks + "postprocessor_hub.default_postprocess",
    ),
    engine,
)
"""


class Miles(Peer):
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
