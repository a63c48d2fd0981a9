"""`python -m tests.tools.peers.rllm <checkout>/rllm-model-gateway`: the tests of rLLM's gateway over HTTP, with Turnlog
in its place.

The tests, their engine and their client are those of the checkout. Where they build the gateway's application, an
application is built that passes requests on, as they are, to a Turnlog process with the feature `rllm`; a call without
a session gets its own. The tests need `pytest-asyncio` and `litellm`, in an environment of their own: with the former,
Turnlog's own tests do not start.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ops.server import ServerProcess
from tests.tools.peers.outcomes import forget_our_tests, run

MODULES = (
    "unit/test_server",
    "unit/test_gateway_client",
    "unit/test_concurrent_sessions",
    "unit/test_error_resilience",
    "unit/test_training_workflow",
    "integration/test_sampling_enforcement_e2e",
)
"""In `tests`: those that speak HTTP to a gateway, but for those that need a vLLM on port 4000."""

OF_ITS_CODE = "not (Url or AutoSplit)"
"""Leaves out what calls the gateway's functions."""

_OF_THE_CONNECTION = frozenset({"host", "content-length", "transfer-encoding", "connection", "date", "server"})


class Place:
    """In place of the gateway: one Turnlog process."""

    def __init__(self, engines: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        environment = {
            "TURNLOG_FEATURES": "all,rllm",
            "TURNLOG_UPSTREAM_DIALECT": "vllm",
            "TURNLOG_WITHOUT_SESSION": "record",
        }
        self._server = ServerProcess(Path(self._folder.name), upstreams=engines, environment=environment)
        self._server.migrate().start()
        weakref.finalize(self, self._server.kill)

    async def pass_on(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in _OF_THE_CONNECTION}
        path, body = request.url.path, await request.body()
        async with httpx.AsyncClient(base_url=self._server.base_url, timeout=60) as client:
            reply = await client.request(
                request.method, path, params=request.query_params, headers=headers, content=body
            )
        kept = {name: value for name, value in reply.headers.items() if name not in _OF_THE_CONNECTION}
        return Response(reply.content, reply.status_code, kept)


def application(config: Any) -> Starlette:
    """In place of the gateway's `create_app`."""
    place = Place([worker.url for worker in config.workers])
    return Starlette(routes=[Route("/{path:path}", place.pass_on, methods=["GET", "POST", "DELETE"])])


def main() -> int:
    checkout, *options = sys.argv[1:]
    root = Path(checkout).resolve()
    sys.path[:0] = [str(root), str(root / "src")]
    forget_our_tests()
    gateway: Any = importlib.import_module("rllm_model_gateway")
    gateway.create_app = application
    files = [str(root / "tests" / f"{name}.py") for name in MODULES]
    run(
        files,
        checkout,
        ["-p", "pytest_asyncio", "-k", OF_ITS_CODE, *options],
        importlib.import_module("tests.unit.conftest"),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
