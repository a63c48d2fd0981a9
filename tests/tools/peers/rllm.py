"""`python -m tests.tools.peers.rllm <checkout>/rllm-model-gateway`: the tests of rLLM's gateway over HTTP, with Turnlog
in its place.

The tests, their engine and their client are those of the checkout. Where they build the gateway's application, an
application is built that passes requests on to a Turnlog process. It spells what the gateway spells in another way:
a session in the path is created on first use, a call without one gets its own, `sampling_params` are pinned `params`, a
trace is a turn of a session's rows, and a weight version is told by resuming the fleet. Routes of the gateway's own
workers have no counterpart. The tests need `pytest-asyncio` and `litellm`, in an environment of their own: with the
former, Turnlog's own tests do not start.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
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

ABOUT_SESSIONS = "not (Url or AutoSplit or _workers or add_worker or add_and_remove or remove_ or flush)"
"""Leaves out the addresses and the administration of the gateway's workers, and the flush of its unwritten traces."""

_TURN = re.compile(r"/sessions/(?P<session>.+?)(?P<route>/v1/.*)")
_OF_THE_CONNECTION = frozenset({"host", "content-length", "transfer-encoding", "connection", "date", "server"})


def traces(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns of a session's rows as the gateway's traces. A turn that several rows share is one trace."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        replies = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for turn, reply in zip(row["turns"], replies[-len(row["turns"]) :], strict=True):
            start, end = turn["output_start"], turn["end"]
            version = row["weight_versions"][start]
            found[turn["turn"]] = {
                "trace_id": f"{row['session_id']}.{turn['turn']}",
                "session_id": row["session_id"],
                "messages": row["messages"][:reply],
                "prompt_token_ids": row["tokens"][:start],
                "response_message": row["messages"][reply],
                "completion_token_ids": row["tokens"][start:end],
                "logprobs": row["logprobs"][start:end],
                "finish_reason": turn["finish_reason"],
                "weight_version": None if row["weight_version_names"] else version,
            }
    return [found[number] for number in sorted(found)]


class Place:
    """In place of the gateway: one Turnlog process."""

    def __init__(self, engines: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        environment = {"TURNLOG_HISTORY": "tree", "TURNLOG_UPSTREAM_DIALECT": "vllm"}
        self._server = ServerProcess(Path(self._folder.name), upstreams=engines, environment=environment)
        self._server.migrate().start()
        weakref.finalize(self, self._server.kill)

    async def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._server.base_url, timeout=60) as client:
            return await client.request(method, path, **request)

    async def pass_on(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in _OF_THE_CONNECTION}
        path = request.url.path
        if turn := _TURN.fullmatch(path):
            headers["x-turnlog-session-id"], path = turn["session"], turn["route"]
        elif request.method == "POST":
            headers["x-turnlog-session-id"] = uuid.uuid4().hex
        body = await request.body()
        reply = await self.ask(request.method, path, params=request.query_params, headers=headers, content=body)
        kept = {name: value for name, value in reply.headers.items() if name not in _OF_THE_CONNECTION}
        return Response(reply.content, reply.status_code, kept)

    async def create(self, request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        if "sampling_params" in body:
            body["params"] = body.pop("sampling_params")
        reply = await self.ask("POST", "/sessions", json=body)
        found = reply.json()
        if reply.is_success:
            found["url"] = str(request.base_url).rstrip("/") + found["base_url"]
        return JSONResponse(found, reply.status_code)

    async def sessions(self, request: Request) -> Response:
        reply = await self.ask("GET", "/sessions")
        return JSONResponse(reply.json()["sessions"], reply.status_code)

    async def session(self, request: Request) -> Response:
        """What was given at create is one level up in the gateway's reply."""
        reply = await self.ask("GET", request.url.path)
        body = reply.json()
        return JSONResponse(
            {**body, "metadata": body["session"]["metadata"]} if reply.is_success else body, reply.status_code
        )

    async def delete(self, request: Request) -> Response:
        """The gateway says how many traces it deleted; Turnlog closes a session and says nothing."""
        reply = await self.ask("DELETE", request.url.path)
        return JSONResponse({}) if reply.is_success else JSONResponse(reply.json(), reply.status_code)

    async def _traces(self, session: str) -> list[dict[str, Any]]:
        reply = await self.ask("GET", "/export", params={"session_id": session, "shape": "turnlog"})
        return traces([json.loads(line) for line in reply.content.splitlines()])

    async def session_traces(self, request: Request) -> Response:
        found = await self._traces(request.path_params["session"])
        limit = request.query_params.get("limit")
        return JSONResponse(found[: int(limit)] if limit else found)

    async def one_trace(self, request: Request) -> Response:
        session, _, _ = request.path_params["trace"].partition(".")
        found = [one for one in await self._traces(session) if one["trace_id"] == request.path_params["trace"]]
        return JSONResponse(found[0]) if found else JSONResponse({}, 404)

    async def weight_version(self, request: Request) -> Response:
        version = json.loads(await request.body())["weight_version"]
        reply = await self.ask("POST", "/fleet/resume", json={"version": str(version)})
        return JSONResponse({"weight_version": version}, reply.status_code)


def application(config: Any) -> Starlette:
    """In place of the gateway's `create_app`."""
    place = Place([worker.url for worker in config.workers])
    return Starlette(
        routes=[
            Route("/sessions", place.create, methods=["POST"]),
            Route("/sessions", place.sessions),
            Route("/sessions/{session:path}/traces", place.session_traces),
            Route("/traces/{trace}", place.one_trace),
            Route("/admin/weight_version", place.weight_version, methods=["POST"]),
            Route("/sessions/{session}", place.session),
            Route("/sessions/{session}", place.delete, methods=["DELETE"]),
            Route("/{path:path}", place.pass_on, methods=["GET", "POST"]),
        ]
    )


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
        ["-p", "pytest_asyncio", "-k", ABOUT_SESSIONS, *options],
        importlib.import_module("tests.unit.conftest"),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
