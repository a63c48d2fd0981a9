"""The engines' control routes, in the shapes of SGLang 0.5.23 and vLLM 0.32, and the simulator's own under ``/sim``."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from msgspec import Struct

from ops.simulator import inference, native, vllm
from ops.simulator.counting import count
from ops.simulator.engine import Engine
from ops.simulator.faults import UnknownFault
from ops.simulator.records import RequestLog
from ops.simulator.wire import NOT_FOUND, BadRequest, FaultOrder, PlannedReply, Reply, json_reply

Query = dict[str, str]
Handler = Callable[[bytes, Query], Awaitable[Reply]]

Outcome = Literal["ok", "missing", "refused", "error"]

FAILURES: dict[Outcome, tuple[str, int]] = {
    "refused": ("The request was refused, as ordered.", 400),
    "error": ("The engine failed, as ordered.", 500),
}


class Behaviour(Struct, forbid_unknown_fields=True):
    """Body of ``/sim/behaviour``: how routes answer from now on. Omitted fields keep their values. With ``dev_mode``
    false, vLLM has none of its routes that control it, and with ``scale_out`` true that deployment's route of aborts.

    ``sessions`` applies to both session routes, which take ``sessions_delay_s`` seconds in any case.
    ``health_hangs_when_paused`` is for SGLang, whose ``/health`` generates a token; vLLM's never hangs. A call that is
    set to fail has no effect.
    """

    health: Outcome = "ok"
    health_hangs_when_paused: bool = True
    sessions: Outcome = "ok"
    sessions_delay_s: float = 0.0
    dev_mode: bool = True
    scale_out: bool = False
    abort: Outcome = "ok"
    pause: Outcome = "ok"
    resume: Outcome = "ok"
    count_tokens: Outcome = "ok"
    server_info: Outcome = "ok"


# The bodies of the routes that they are named after.


class OpenSession(Struct):
    capacity_of_str_len: int
    session_id: str | None = None
    streaming: bool | None = None
    timeout: float | None = None


class CloseSession(Struct):
    session_id: str


class AbortRequest(Struct):
    rid: str | None = None
    abort_all: bool = False


class PauseGeneration(Struct):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class UpdateWeightVersion(Struct):
    """``abort_all_requests`` is SGLang's; vLLM's aborts nothing."""

    new_version: str
    abort_all_requests: bool = True


class UpdateWeights(Struct):
    """Of SGLang, from a folder, which is not read."""

    model_path: str
    weight_version: str | None = None


class Tokenize(Struct):
    """Of SGLang's also several texts at once, or a chat."""

    prompt: str | list[str] = ""
    messages: list[msgspec.Raw] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")


class Detokenize(Struct):
    tokens: list[int | list[int]]


class LoadAdapter(Struct):
    lora_name: str
    lora_path: str


class UnloadAdapter(Struct):
    lora_name: str


class AbortRequests(Struct):
    """Of both of vLLM's routes. None or no ids at all: the development mode aborts everything."""

    request_ids: list[str] | None = None


class Latency(Struct, forbid_unknown_fields=True):
    """Body of ``/sim/latency``: the latency in either unit."""

    latency_s: float | None = None
    latency_ms: float | None = None


TAKEN = "Failed to open the session. Check if a session with the same id is still open."

HEALTH_PATIENCE_S = 20.0
"""Seconds that SGLang's ``/health`` waits for the token that it generates."""


class Control:
    """Handles all routes except generations. Unknown routes return 404, as on an engine."""

    def __init__(self, engine: Engine, requests: RequestLog) -> None:
        self._engine = engine
        self._requests = requests
        self._sessions: dict[str, OpenSession] = {}
        self._closed: list[str] = []
        self._loaded: dict[str, str] = dict.fromkeys(engine.config.adapters, "")
        self._behaviour = Behaviour(scale_out=engine.config.scale_out)
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/messages/count_tokens"): self._count_tokens,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/sim/behaviour"): self._sim_behaviour,
            ("POST", "/sim/faults"): self._sim_faults,
            ("POST", "/sim/replies"): self._sim_replies,
            ("POST", "/sim/latency"): self._sim_latency,
            ("GET", "/sim/stats"): self._sim_stats,
            ("GET", "/sim/requests"): self._sim_requests,
            ("POST", "/sim/reset"): self._sim_reset,
        }
        if engine.config.dialect == "sglang":
            self._routes |= {
                ("POST", "/open_session"): self._open_session,
                ("POST", "/close_session"): self._close_session,
                ("POST", "/abort_request"): self._abort_request,
                ("POST", "/pause_generation"): self._pause_generation,
                ("POST", "/continue_generation"): self._continue_generation,
                ("POST", "/update_weight_version"): self._update_weight_version,
                ("POST", "/update_weights_from_disk"): self._update_weights,
                ("POST", "/flush_cache"): self._flush_cache,
                ("GET", "/flush_cache"): self._flush_cache,
                ("GET", "/health_generate"): self._health,
                ("GET", "/"): self._root,
                ("GET", "/ping"): self._ping,
                ("POST", "/v1/tokenize"): self._tokenize,
                ("POST", "/v1/detokenize"): self._detokenize,
                ("POST", "/load_lora_adapter"): self._load_adapter,
                ("POST", "/unload_lora_adapter"): self._unload_adapter,
                ("POST", "/release_memory_occupation"): self._occupy,
                ("POST", "/resume_memory_occupation"): self._occupy,
                ("GET", "/model_info"): self._model_info,
                ("GET", "/get_model_info"): self._model_info,
                ("GET", "/server_info"): self._server_info,
                ("GET", "/get_server_info"): self._server_info,
                ("POST", "/separate_reasoning"): native.separate_reasoning,
                ("POST", "/parse_function_call"): native.parse_function_call,
            }

    def find(self, method: str, path: str) -> Handler | None:
        """The handler of a route, or ``None``. vLLM has most only in its development mode."""
        routes = self._routes
        if self._engine.config.dialect == "vllm":
            if self._behaviour.dev_mode:
                routes = routes | {
                    ("POST", "/pause"): self._vllm_pause,
                    ("POST", "/resume"): self._vllm_resume,
                    ("GET", "/is_paused"): self._vllm_is_paused,
                    ("POST", "/abort_requests"): self._vllm_abort,
                    ("GET", "/weight_info"): self._vllm_weight_info,
                    ("POST", "/reset_prefix_cache"): self._vllm_reset_cache,
                    ("POST", "/update_weight_version"): self._vllm_update_weight_version,
                }
                if self._engine.config.logprobs_mode is not None:
                    routes[("GET", "/server_info")] = self._vllm_server_info
            if self._behaviour.scale_out:
                routes = routes | {
                    ("POST", "/inference/v1/abort_requests"): self._vllm_scale_out_abort,
                    ("POST", inference.RENDER): self._vllm_render,
                }
            if self.is_disabled(path):
                return self._vllm_disabled
        return routes.get((method, path))

    def has(self, path: str) -> bool:
        """Has it a route with this path, by whatever method?"""
        return any(self.find(method, path) is not None for method in ("GET", "POST", "PUT"))

    def is_disabled(self, path: str) -> bool:
        """Does vLLM answer 403 there, for want of `--enable-scale-out`?"""
        return path in inference.ROUTES and not self._behaviour.scale_out

    def _failed(self, outcome: Outcome) -> Reply | None:
        if outcome == "missing":
            return json_reply(NOT_FOUND, 404)
        failure = FAILURES.get(outcome)
        return None if failure is None else self._engine.error(*failure)

    async def _health(self, body: bytes, query: Query) -> Reply:
        if failed := self._failed(self._behaviour.health):
            return failed
        if self._behaviour.health_hangs_when_paused and self._engine.config.dialect == "sglang":
            try:
                await asyncio.wait_for(self._engine.runs.resumed(), HEALTH_PATIENCE_S)
            except TimeoutError:
                return Reply(status=503)
        return Reply((b"",), content_type=b"")

    async def _models(self, body: bytes, query: Query) -> Reply:
        model = self._engine.config.model
        card = {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": self._engine.config.dialect,
            "root": model,
            "parent": None,
            "max_model_len": self._engine.config.context_length,
        }
        return json_reply({"object": "list", "data": [card]})

    async def _count_tokens(self, body: bytes, query: Query) -> Reply:
        if failed := self._failed(self._behaviour.count_tokens):
            return failed
        try:
            return json_reply({"input_tokens": count(self._engine.template, body)})
        except BadRequest as error:
            return self._engine.error(str(error), error.status)

    async def _tokenize(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=Tokenize)
        length = self._engine.config.context_length
        if request.messages is not None:
            ids = list(self._engine.template.prompt(self._engine.template.read(request.messages, request.tools)).ids())
            return json_reply({"tokens": ids, "count": len(ids), "max_model_len": length})
        if not isinstance(request.prompt, list):
            ids = self._engine.tokenizer.ids(request.prompt)
            return json_reply({"tokens": ids, "count": len(ids), "max_model_len": length})
        lists = [self._engine.tokenizer.ids(prompt) for prompt in request.prompt]
        return json_reply({"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": length})

    async def _detokenize(self, body: bytes, query: Query) -> Reply:
        tokens, decode = msgspec.json.decode(body, type=Detokenize).tokens, self._engine.tokenizer.decode
        text = [decode(ids) for ids in tokens if isinstance(ids, list)] or decode([t for t in tokens if type(t) is int])
        return json_reply({"prompt" if self._engine.config.dialect == "vllm" else "text": text})

    async def _root(self, body: bytes, query: Query) -> Reply:
        return json_reply("SGLang is running")

    async def _ping(self, body: bytes, query: Query) -> Reply:
        return Reply((b"",), content_type=b"")

    async def _occupy(self, body: bytes, query: Query) -> Reply:
        """Memory is released and resumed in silence."""
        return json_reply(None)

    async def _load_adapter(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=LoadAdapter)
        self._loaded[request.lora_name] = request.lora_path
        return self._adapters()

    async def _unload_adapter(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=UnloadAdapter)
        if self._loaded.pop(request.lora_name, None) is None:
            message = f"LoRA with name {request.lora_name} does not exist."
            return json_reply({"success": False, "error_message": message, "loaded_adapters": None}, 400)
        return self._adapters()

    def _adapters(self) -> Reply:
        return json_reply({"success": True, "error_message": None, "loaded_adapters": self._loaded})

    async def _flush_cache(self, body: bytes, query: Query) -> Reply:
        told = (
            b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
            b"the operation will not be performed.)\n"
        )
        return Reply((told,), content_type=b"")

    async def _vllm_reset_cache(self, body: bytes, query: Query) -> Reply:
        return Reply((b"",), content_type=b"")

    async def _update_weights(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=UpdateWeights)
        message = "Succeeded to update model weights."
        if request.weight_version is not None:
            self._engine.runs.new_version(request.weight_version)
            self._engine.weight_version = request.weight_version
            message += f" Weight version updated to {request.weight_version}."
        return json_reply({"success": True, "message": message, "num_paused_requests": 0})

    async def _server_info(self, body: bytes, query: Query) -> Reply:
        """Of SGLang's arguments those that say how it samples, streams and parses."""
        if failed := self._failed(self._behaviour.server_info):
            return failed
        config = self._engine.config
        return json_reply(
            {
                "sampling_defaults": config.sampling_defaults,
                "incremental_streaming_output": config.incremental,
                "reasoning_parser": "simulator",
                "tool_call_parser": "simulator",
                "enable_cache_report": config.cache_report,
                "return_input_ids": False,
                "return_output_ids": False,
                "weight_version": self._engine.weight_version,
                "version": "0.5.23",
            }
        )

    async def _model_info(self, body: bytes, query: Query) -> Reply:
        config = self._engine.config
        return json_reply(
            {
                "model_path": config.model,
                "served_model_name": config.model,
                "tokenizer_path": config.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._engine.weight_version,
                "reasoning_parser": "simulator",
                "tool_call_parser": "simulator",
            }
        )

    async def _session_failed(self) -> Reply | None:
        if self._behaviour.sessions_delay_s > 0:
            await asyncio.sleep(self._behaviour.sessions_delay_s)
        return self._failed(self._behaviour.sessions)

    async def _open_session(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=OpenSession)
        if failed := await self._session_failed():
            return failed
        name = request.session_id or uuid.uuid4().hex
        if name in self._sessions:
            return json_reply({"error": {"message": TAKEN}}, 400)
        self._sessions[name] = request
        return json_reply(name)

    async def _close_session(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=CloseSession)
        if failed := await self._session_failed():
            return failed
        self._closed.append(request.session_id)
        self._sessions.pop(request.session_id, None)
        return Reply((b"",), content_type=b"")

    async def _abort_request(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=AbortRequest)
        if failed := self._failed(self._behaviour.abort):
            return failed
        self._engine.runs.abort(request.rid or "", request.abort_all)
        return Reply((b"",), content_type=b"")

    async def _pause_generation(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body or b"{}", type=PauseGeneration)
        if failed := self._failed(self._behaviour.pause):
            return failed
        self._engine.runs.pause(retract=request.mode == "retract")
        if request.mode == "abort":
            self._engine.runs.abort("", everything=True)
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, body: bytes, query: Query) -> Reply:
        if failed := self._failed(self._behaviour.resume):
            return failed
        self._engine.runs.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weight_version(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=UpdateWeightVersion)
        if request.abort_all_requests:
            self._engine.runs.abort("", everything=True)
        else:
            self._engine.runs.new_version(request.new_version)
        self._engine.weight_version = request.new_version
        message = f"Weight version updated to {request.new_version}"
        return json_reply({"success": True, "message": message, "new_version": request.new_version})

    async def _vllm_server_info(self, body: bytes, query: Query) -> Reply:
        model_config = {"model": self._engine.config.model, "logprobs_mode": self._engine.config.logprobs_mode}
        return json_reply({"vllm_config": {"model_config": model_config}, "vllm_env": {}, "system_env": {}})

    async def _vllm_pause(self, body: bytes, query: Query) -> Reply:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return self._engine.error(f"unknown mode {mode[:40]!r}")
        if failed := self._failed(self._behaviour.pause):
            return failed
        if mode == "wait":
            await self._engine.runs.drained()
        self._engine.runs.pause()
        if mode == "abort":
            self._engine.runs.abort("", everything=True)
        return json_reply({"status": "paused"})

    async def _vllm_resume(self, body: bytes, query: Query) -> Reply:
        if failed := self._failed(self._behaviour.resume):
            return failed
        self._engine.runs.resume()
        return json_reply({"status": "resumed"})

    async def _vllm_is_paused(self, body: bytes, query: Query) -> Reply:
        return json_reply({"is_paused": self._engine.runs.paused})

    async def _vllm_abort(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=AbortRequests)
        if failed := self._failed(self._behaviour.abort):
            return failed
        runs = self._engine.runs
        if not request.request_ids:
            return json_reply({"status": "aborted", "aborted": runs.abort("", everything=True)})
        runs.abort_external(request.request_ids)
        return json_reply({"status": "aborted", "aborted": len(request.request_ids)})

    async def _vllm_scale_out_abort(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=AbortRequests)
        if failed := self._failed(self._behaviour.abort):
            return failed
        if request.request_ids is None:
            return json_reply({"detail": "Missing 'request_ids' in request body"}, 400)
        self._engine.runs.abort_external(request.request_ids)
        return Reply((b"",), content_type=b"")

    async def _vllm_render(self, body: bytes, query: Query) -> Reply:
        return inference.rendered(body, self._engine.template, self._engine.config)

    async def _vllm_disabled(self, body: bytes, query: Query) -> Reply:
        return vllm.error(inference.DISABLED, 403, "PermissionDeniedError")

    async def _vllm_weight_info(self, body: bytes, query: Query) -> Reply:
        return json_reply({"weight_version": self._engine.weight_version})

    async def _vllm_update_weight_version(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=UpdateWeightVersion)
        self._engine.runs.new_version(request.new_version)
        self._engine.weight_version = request.new_version
        return json_reply({"success": True, "new_version": request.new_version})

    async def _sim_faults(self, body: bytes, query: Query) -> Reply:
        try:
            self._engine.faults.add(msgspec.json.decode(body, type=FaultOrder))
        except UnknownFault as error:
            return self._engine.error(str(error))
        return json_reply({"queued": self._engine.faults.names()})

    async def _sim_replies(self, body: bytes, query: Query) -> Reply:
        self._engine.replies.append(msgspec.json.decode(body, type=PlannedReply))
        return json_reply({"planned": len(self._engine.replies)})

    async def _sim_latency(self, body: bytes, query: Query) -> Reply:
        request = msgspec.json.decode(body, type=Latency)
        seconds = request.latency_s if request.latency_s is not None else (request.latency_ms or 0.0) / 1000
        self._engine.latency_s = seconds
        return json_reply({"latency_s": seconds})

    async def _sim_behaviour(self, body: bytes, query: Query) -> Reply:
        changes = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        known = msgspec.json.decode(msgspec.json.encode(self._behaviour), type=dict[str, msgspec.Raw])
        self._behaviour = msgspec.json.decode(msgspec.json.encode(known | changes), type=Behaviour)
        return json_reply(self._behaviour)

    async def _sim_stats(self, body: bytes, query: Query) -> Reply:
        engine, runs, counters = self._engine, self._engine.runs, self._engine.counters
        return json_reply(
            {
                # Started are those that are finished (the aborted among them), disconnected or in flight.
                "started": counters.started,
                "finished": counters.finished,
                "aborted": runs.aborted,
                "disconnected": runs.disconnected,
                "faulted": counters.faulted,
                "refused": counters.refused,
                "in_flight": len(runs.rids),
                "prompt_tokens": counters.prompt_tokens,
                "prefix_hit_tokens": counters.prefix_hit_tokens,
                "sampled_tokens": counters.sampled_tokens,
                "in_flight_rids": runs.rids,
                "paused": runs.paused,
                "weight_version": engine.weight_version,
                "latency_s": engine.latency_s,
                "prefix_cache_tokens": engine.prefixes.tokens,
                "probes": self._requests.probes,
                "queued_faults": engine.faults.names(),
                "open_sessions": list(self._sessions),
                "closed_sessions": self._closed,
                "requests": [seen.summary() for seen in self._requests.last(int(query.get("last", "20")))],
            }
        )

    async def _sim_requests(self, body: bytes, query: Query) -> Reply:
        seen = self._requests.last(int(query.get("last", "1")))
        return json_reply([{**one.whole(), "adapter": self._engine.adapter_of(one.body)} for one in seen])

    async def _sim_reset(self, body: bytes, query: Query) -> Reply:
        self._engine.reset()
        self._requests.clear()
        self._sessions.clear()
        self._closed.clear()
        self._behaviour = Behaviour(scale_out=self._engine.config.scale_out)
        return json_reply({"ok": True})
