"""Runs one simulated engine on one port."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ops.simulator.app import Simulator
from ops.simulator.config import Config


class NoDelayProtocol(HttpToolsProtocol):
    """Disables Nagle's algorithm on every connection, which adds 40 ms to a call."""

    def connection_made(self, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)


class AnnouncedServer(uvicorn.Server):
    """Prints its address when it listens, so that a parent process need not poll."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        print(f"listening http://{host}:{port}", flush=True)


def _not_a_reset(record: logging.LogRecord) -> bool:
    """Whether to log a record: not uvicorn's error about an unfinished reply body, which is an intended fault."""
    return not record.getMessage().startswith("ASGI callable returned without completing response")


def _shape(text: str) -> tuple[int, int, int]:
    layers, top_k, experts = (int(part) for part in text.split(","))
    return layers, top_k, experts


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _arguments(given: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port; the address is printed on stdout")
    parser.add_argument("--dialect", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--weight-versions", action="store_true", help="always report the spans of weight versions")
    parser.add_argument("--silent-versions", action="store_true", help="vLLM: no reply names a weight version")
    parser.add_argument("--model", default="simulator")
    parser.add_argument("--logprobs-mode", help="what vLLM's /server_info names; without it the route is missing")
    parser.add_argument(
        "--adapters", type=_names, default=(), metavar="NAME,…", help="loaded LoRA adapters; other names are refused"
    )
    parser.add_argument("--reasoning", type=float, default=0.25, help="share of generations with reasoning")
    parser.add_argument("--cache-tokens", type=int, default=2**22, help="size of the prefix cache")
    parser.add_argument(
        "--prefill-us-per-token", type=float, default=0.0, help="time per token outside the prefix cache"
    )
    parser.add_argument(
        "--no-token-in", action="store_true", help="ignore the ids of a chat's prompt, as older builds do"
    )
    parser.add_argument(
        "--incremental-streaming-output",
        action="store_true",
        help="SGLang: an event of /generate has what is new",
    )
    parser.add_argument(
        "--sampling-defaults", choices=("openai", "model"), default="openai", help="SGLang's, as it says"
    )
    parser.add_argument("--keep-requests", type=int, default=256, help="requests kept for /sim/requests")
    parser.add_argument("--experts", type=_shape, default=(4, 2, 64), metavar="LAYERS,TOP_K,EXPERTS")
    return parser.parse_args(given)


async def _serve(arguments: argparse.Namespace) -> None:
    config = Config(
        dialect=arguments.dialect,
        seed=arguments.seed,
        latency_s=arguments.latency_ms / 1000,
        weight_version=arguments.weight_version,
        weight_versions=arguments.weight_versions,
        silent_versions=arguments.silent_versions,
        model=arguments.model,
        logprobs_mode=arguments.logprobs_mode,
        adapters=arguments.adapters,
        reasoning=arguments.reasoning,
        experts=arguments.experts,
        keep_requests=arguments.keep_requests,
        cache_tokens=arguments.cache_tokens,
        prefill_s=arguments.prefill_us_per_token / 1e6,
        token_in=not arguments.no_token_in,
        incremental=arguments.incremental_streaming_output,
        sampling_defaults=arguments.sampling_defaults,
    )
    listener = socket.create_server((arguments.host, arguments.port), backlog=2048)
    settings = uvicorn.Config(
        Simulator(config),
        http=NoDelayProtocol,
        access_log=False,
        log_level=logging.ERROR,
        server_header=True,
        timeout_keep_alive=600,
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn.error").addFilter(_not_a_reset)
    await AnnouncedServer(settings).serve(sockets=[listener])


def main(given: Sequence[str] | None = None, prog: str = "python -m ops.simulator") -> int:
    """Run the command line `given`, by default the process's own. `prog` is the program's name in its help."""
    arguments = _arguments(given, prog)
    uvicorn_loop = uvicorn.Config(app="", loop="uvloop").get_loop_factory()
    try:
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(_serve(arguments))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
