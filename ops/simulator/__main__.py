"""Runs one simulated engine on one port."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import socket
import sys
from collections.abc import Sequence

import uvicorn

from ops.simulator.app import Simulator
from ops.simulator.wire import Config

_FIELDS = {field.name for field in dataclasses.fields(Config)}


class AnnouncedServer(uvicorn.Server):
    """Prints its address when it listens, so that a parent process need not poll."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        print(f"listening http://{host}:{port}", flush=True)


def _not_a_reset(record: logging.LogRecord) -> bool:
    """Whether to log a record: not uvicorn's error about an unfinished reply body, which is an intended fault."""
    return not record.getMessage().startswith("ASGI callable returned without completing response")


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _arguments(given: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The options, those of `Config` by its fields' names."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: any free port; the address is printed on stdout")
    add("--latency-ms", type=float, default=0.0)
    add("--prefill-us-per-token", type=float, default=0.0, help="time per token outside the prefix cache")
    add("--dialect", choices=("sglang", "vllm", "openai"))
    add("--api-key", help="the vendor's (openai); without one it takes any")
    add("--seed", type=int)
    add("--weight-version")
    add("--silent-versions", action="store_true", help="vLLM: no reply names a weight version")
    add("--enable-scale-out", dest="scale_out", action="store_true", help="as vLLM's option")
    add("--model")
    add("--logprobs-mode", help="what vLLM's /server_info names; without it the route is missing")
    add("--adapters", type=_names, metavar="NAME,…", help="loaded LoRA adapters; other names are refused")
    add("--reasoning", type=float, help="share of generations with reasoning")
    add("--cache-tokens", type=int, help="size of the prefix cache")
    add("--no-token-in", dest="token_in", action="store_false", help="ignore the ids of a chat's prompt")
    add("--incremental-streaming-output", dest="incremental", action="store_true", help="as SGLang's option")
    add("--enable-cache-report", dest="cache_report", action="store_true", help="as SGLang's option")
    add("--context-length", type=int, help="tokens of prompt and reply together")
    add("--sampling-defaults", choices=("openai", "model"), help="SGLang's, as it says")
    add("--keep-requests", type=int, help="requests kept for /sim/requests")
    add("--experts", type=_shape, metavar="LAYERS,TOP_K,EXPERTS")
    return parser.parse_args(given)


async def _serve(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if value is not None and name in _FIELDS}
    config = Config(**given, latency_s=arguments.latency_ms / 1000, prefill_s=arguments.prefill_us_per_token / 1e6)
    listener = socket.create_server((arguments.host, arguments.port), backlog=2048)
    settings = uvicorn.Config(
        Simulator(config),
        http="httptools",
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
