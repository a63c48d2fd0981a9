"""vLLM's control routes, in the shapes of 0.32: those of its development mode, and a scale-out deployment's abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from ops.simulator.behaviour import Behaviour, Handler, Outcome, Query
from ops.simulator.engine import Engine
from ops.simulator.wire import Reply, json_reply

Routes = dict[tuple[str, str], Handler]


class AbortRequests(Struct):
    """Body of both abort routes. None or no ids at all: the development mode aborts everything."""

    request_ids: list[str] | None = None


class NewVersion(Struct):
    """Body of ``/update_weight_version``, which aborts nothing."""

    new_version: str


class VllmControl:
    """``behaviour`` gives what was ordered last, ``failed`` the reply of a route that is set to fail."""

    def __init__(
        self, engine: Engine, behaviour: Callable[[], Behaviour], failed: Callable[[Outcome], Reply | None]
    ) -> None:
        self._engine = engine
        self._behaviour = behaviour
        self._failed = failed
        self._dev_mode: Routes = {
            ("POST", "/pause"): self._pause_generation,
            ("POST", "/resume"): self._resume_generation,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/abort_requests"): self._abort_requests,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/update_weight_version"): self._update_weight_version,
        }
        if engine.config.logprobs_mode is not None:
            self._dev_mode["GET", "/server_info"] = self._server_info
        self._scale_out: Routes = {("POST", "/inference/v1/abort_requests"): self._scale_out_abort}

    def find(self, method: str, path: str) -> Handler | None:
        """The handler of a route that the engine was started with, or ``None``."""
        behaviour = self._behaviour()
        routes = (self._dev_mode if behaviour.dev_mode else {}) | (self._scale_out if behaviour.scale_out else {})
        return routes.get((method, path))

    async def _server_info(self, body: bytes, query: Query) -> Reply:
        model_config = {"model": self._engine.config.model, "logprobs_mode": self._engine.config.logprobs_mode}
        return json_reply({"vllm_config": {"model_config": model_config}, "vllm_env": {}, "system_env": {}})

    async def _pause_generation(self, body: bytes, query: Query) -> Reply:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return self._engine.error(f"unknown mode {mode[:40]!r}")
        if failed := self._failed(self._behaviour().pause):
            return failed
        if mode == "wait":
            await self._engine.runs.drained()
        self._engine.runs.pause()
        if mode == "abort":
            self._engine.runs.abort("", everything=True)
        return json_reply({"status": "paused"})

    async def _resume_generation(self, body: bytes, query: Query) -> Reply:
        if failed := self._failed(self._behaviour().resume):
            return failed
        self._engine.runs.resume()
        return json_reply({"status": "resumed"})

    async def _is_paused(self, body: bytes, query: Query) -> Reply:
        return json_reply({"is_paused": self._engine.runs.paused})

    async def _abort_requests(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=AbortRequests)
        if failed := self._failed(self._behaviour().abort):
            return failed
        runs = self._engine.runs
        if not request.request_ids:
            return json_reply({"status": "aborted", "aborted": runs.abort("", everything=True)})
        runs.abort_external(request.request_ids)
        return json_reply({"status": "aborted", "aborted": len(request.request_ids)})

    async def _scale_out_abort(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=AbortRequests)
        if failed := self._failed(self._behaviour().abort):
            return failed
        if request.request_ids is None:
            detail: dict[str, Any] = {"detail": "Missing 'request_ids' in request body"}
            return json_reply(detail, 400)
        self._engine.runs.abort_external(request.request_ids)
        return Reply((b"",))

    async def _weight_info(self, body: bytes, query: Query) -> Reply:
        return json_reply({"weight_version": self._engine.weight_version})

    async def _update_weight_version(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=NewVersion)
        self._engine.runs.new_version(request.new_version)
        self._engine.weight_version = request.new_version
        return json_reply({"success": True, "new_version": request.new_version})
