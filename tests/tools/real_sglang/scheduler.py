"""Stands in for SGLang's scheduler process (0.5.23): it reads the same messages and sends such as the real one sends.

It runs in SGLang's environment. A prompt without a mark (`plays`) is answered as the tiny model of the other lane
would: about the weather, by way of the tool. A prompt that ends within a generation goes on with it.
"""

from __future__ import annotations

import os
import random
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
from sglang.srt.managers import io_struct as messages
from sglang.srt.utils.weight_versions import WeightVersionSpan
from transformers import AutoTokenizer

from tests.tools.real_engine import weather
from tests.tools.real_sglang.plays import FOLDER, Play, Plays, Sampled, experts_of, logprobs_of

_READY = {
    "status": "ready",
    "max_total_num_tokens": 1 << 20,
    "max_req_input_len": 32000,
    "startup_time": {},
    "hicache_object_layout": None,
}
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
_WEATHER = Play(step=8)
_STEP_S = 0.02
"""Between two messages of an unmarked generation, so that kills find it running."""

_SHOWN = 5
"""Tokens of a prompt that the detokenizer needs to see: the first sampled one may go on with their text."""

_LOGPROBS = tuple(
    f"{side}_{kind}_{part}"
    for side in ("input", "output")
    for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
    for part in ("val", "idx")
)
_NEVER = (
    *("output_token_entropy_val", "output_token_sampling_mask", "output_hidden_states", "indexer_topk"),
    *("placeholder_tokens_idx", "placeholder_tokens_val"),
)
_ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "FlushCacheReqInput": ("FlushCacheReqOutput", {"success": True}),
    "GetInternalStateReq": ("GetInternalStateReqOutput", {"internal_state": {}}),
    "UpdateWeightFromDiskReqInput": (
        "UpdateWeightFromDiskReqOutput",
        {"success": True, "message": "ok", "num_paused_requests": 0},
    ),
    "UpdateWeightVersionReqInput": ("UpdateWeightVersionReqOutput", {}),
}
"""By the kind of a command: the kind of its answer, and what that says."""


@dataclass
class Run:
    """A request and what it will have sampled; `sent` of its ids are out. `number` is its play's, if it is marked."""

    request: Any
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    play: Play
    number: int | None
    finish: dict[str, Any]
    waits: bool
    sent: int = 0
    due: float = 0.0
    aborted: dict[str, Any] | None = None
    retractions: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)
    """Of the sent ids: a version, and where it ends."""


class Scheduler:
    def __init__(self, server_args: Any, port_args: Any) -> None:
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.connect(port_args.scheduler_input_ipc_name)
        self._detokenizer, self._manager = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
        self._detokenizer.connect(port_args.detokenizer_ipc_name)
        self._manager.connect(port_args.tokenizer_ipc_name)
        self._tokenizer = AutoTokenizer.from_pretrained(server_args.model_path)
        self._plays = Plays(Path(os.environ[FOLDER]))
        self._rng = random.Random(1)
        self._version = server_args.weight_version
        self._is_paused = False
        self._running: dict[str, Run] = {}
        self._begun: list[tuple[list[int], list[int]]] = []

    def run(self) -> None:
        while True:
            self._receive()
            for rid, run in list(self._running.items()):
                if self._is_due(run):
                    self._step(rid, run)

    def _is_due(self, run: Run) -> bool:
        if self._is_paused or run.waits:
            return False
        if run.aborted is None and run.number is not None and run.sent == run.play.hold_at:
            return not self._plays.hold(run.number)
        return run.aborted is not None or run.due <= time.monotonic()

    def _receive(self) -> None:
        if not self._inbox.poll(5):
            return
        message = messages.sock_recv(self._inbox)
        kind = type(message).__name__
        match kind:
            case "TokenizedGenerateReqInput":
                self._begin(message)
            case "BatchTokenizedGenerateReqInput":
                for one in message.batch:
                    self._begin(one)
            case "AbortReq":
                self._abort(message)
            case "PauseGenerationReqInput":
                self._pause(message.mode)
            case "ContinueGenerationReqInput":
                self._is_paused = False
                for run in self._running.values():
                    run.waits = run.play.waits  # what a pause took back goes on
            case "FreezeGCReq":
                pass  # nobody waits for an answer
            case _:
                self._version = (
                    getattr(message, "new_version", None) or getattr(message, "weight_version", None) or self._version
                )
                answer, fields = _ANSWERS[kind]
                messages.sock_send(self._manager, getattr(messages, answer)(**fields))

    def _begin(self, request: Any) -> None:
        prompt = list(request.input_ids)
        shown = str(self._tokenizer.decode(prompt))
        marked = self._plays.of(shown)
        number, play = marked or (None, _WEATHER)
        ids = self._rest_of_begun(prompt)
        if ids is None:
            text = play.text if marked else self._weather(shown)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if play.ends == "stop":
                ids.append(self._tokenizer.eos_token_id)
        self._begun.append((prompt, ids))
        finishes: dict[str, dict[str, Any]] = {
            "stop": {"type": "stop", "matched": ids[-1]},
            "length": {"type": "length", "length": len(ids)},
            "abort": {
                **_ABORTED,
                "message": play.message,
                "status_code": play.status,
                "err_type": "BadRequestError" if play.status else None,
            },
        }
        finish, most = finishes[play.ends], request.sampling_params.max_new_tokens
        if most is not None and most < len(ids):
            ids, finish = ids[:most], {"type": "length", "length": most}
        logprobs = logprobs_of(prompt, ids)
        waits = play.waits and number is not None and self._plays.hold(number)
        self._running[request.rid] = Run(request, prompt, ids, logprobs, play, number, finish, waits)

    def _rest_of_begun(self, prompt: list[int]) -> list[int] | None:
        """What a generation would have sampled next whose beginning the prompt ends with."""
        for begun, ids in reversed(self._begun):
            more = len(prompt) - len(begun)
            if 0 < more < len(ids) and prompt == begun + ids[:more]:
                return ids[more:]
        return None

    def _weather(self, text: str) -> str:
        """What the tiny model would say, less the end token."""
        rng, (_, _, last) = self._rng, text.rpartition("<|im_start|>user\n")
        asks = "<tools>" in text and "<tool_response>" not in last
        calling, *_, answer = weather.round_trip(rng, with_tool=True)[1:]
        said = weather.output_of(calling if asks else answer).removesuffix("<|im_end|>").rpartition("</think>\n\n")[2]
        thought = f"<think>\n{rng.choice(weather.ADVICE)}\n</think>\n\n" if "aloud" in last else ""
        return thought + said

    def _abort(self, message: Any) -> None:
        for rid, run in list(self._running.items()):
            if not (message.abort_all or rid.startswith(message.rid)):
                continue
            if run.waits:
                # From the waiting queue nothing goes through the detokenizer: the request itself comes back.
                spans = self._spans(run)
                back = messages.AbortReq(rid=rid, finished_reason=message.finished_reason, weight_versions=spans)
                self._ended(rid, run)
                messages.sock_send(self._manager, back)
            else:
                run.aborted = message.finished_reason or _ABORTED

    def _pause(self, mode: str) -> None:
        self._is_paused = True
        if mode == "retract":
            for run in self._running.values():
                run.waits, run.retractions = True, run.retractions + 1

    def _step(self, rid: str, run: Run) -> None:
        first, prompt, request = run.sent, run.prompt, run.request
        last = first if run.aborted else min(len(run.ids), first + (run.play.step or len(run.ids)))
        if run.play.hold_at is not None and first < run.play.hold_at:
            last = min(last, run.play.hold_at)
        new, run.sent, run.due = run.ids[first:last], last, time.monotonic() + _STEP_S * (run.number is None)
        if new:
            kept = run.versions[:-1] if run.versions and run.versions[-1][0] == self._version else run.versions
            run.versions = [*kept, (self._version, last)]
        finished = run.aborted or (run.finish if last == len(run.ids) else None)
        shown = [] if first else prompt[-_SHOWN:]
        params = request.sampling_params
        output = messages.BatchTokenIDOutput(
            rids=[rid],
            http_worker_ipcs=[request.http_worker_ipc],
            finished_reasons=[finished],
            decoded_texts=[""],
            decode_ids=[array("q", [*shown, *new])],
            read_offsets=[len(shown)],
            output_ids=[array("q", new)],
            skip_special_tokens=[params.skip_special_tokens],
            spaces_between_special_tokens=[params.spaces_between_special_tokens],
            no_stop_trim=[params.no_stop_trim],
            prompt_tokens=[len(prompt)],
            reasoning_tokens=[0],
            completion_tokens=[last],
            cached_tokens=[run.play.cached],
            weight_versions=[self._spans(run)],
            retraction_counts=[run.retractions],
            dp_ranks=[0],
            routed_experts=[self._experts(run) if finished else None],
            **_logprob_fields(run, first, last),
            **dict.fromkeys(_NEVER),
        )
        if finished:
            self._ended(rid, run)
        messages.sock_send(self._detokenizer, output)

    def _spans(self, run: Run) -> list[Any]:
        versions = run.versions or [(self._version, 0)]
        starts = [0, *(end for _, end in versions)]
        return [
            WeightVersionSpan(version=version, start=start, end=end)
            for start, (version, end) in zip(starts, versions, strict=False)
        ]

    def _experts(self, run: Run) -> Any:
        rows = _expert_rows(run) if run.request.return_routed_experts else None
        if rows is None or run.play.experts is None:
            return None
        rows = rows[run.request.routed_experts_start_len :]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), *run.play.experts)

    def _ended(self, rid: str, run: Run) -> None:
        """Before the message is sent: once a test has the reply, it reads what was sampled."""
        ids, logprobs = run.ids[: run.sent], run.logprobs[: run.sent]
        self._plays.note(Sampled(rid, run.prompt, ids, logprobs, run.versions, _expert_rows(run)))
        del self._running[rid]


def _expert_rows(run: Run) -> list[list[int]] | None:
    """Of all tokens but the last, which was never read."""
    if run.play.experts is None:
        return None
    return [experts_of(position, *run.play.experts) for position in range(len(run.prompt) + run.sent - 1)]


def _logprob_fields(run: Run, first: int, last: int) -> dict[str, Any]:
    """The logprobs of the ids from `first` to `last`, and with the first ones the prompt's."""
    request, ids, logprobs = run.request, run.ids[first:last], run.logprobs[first:last]
    filled: dict[str, Any] = {name: [[]] for name in _LOGPROBS}
    if not request.return_logprob:
        return filled
    filled["output_token_logprobs_val"], filled["output_token_logprobs_idx"] = [logprobs], [ids]
    if top := request.top_logprobs_num:
        filled["output_top_logprobs_val"] = [[[one - 0.5 * rank for rank in range(top)] for one in logprobs]]
        filled["output_top_logprobs_idx"] = [[[token, *range(1, top)] for token in ids]]
    if first == 0 and (start := request.logprob_start_len) >= 0:
        known = [None, *logprobs_of(run.prompt[:1], run.prompt[1:])]
        filled["input_token_logprobs_val"], filled["input_token_logprobs_idx"] = [known[start:]], [run.prompt[start:]]
    return filled


def run_scheduler_process(server_args: Any, port_args: Any, *ranks_and_writer: Any) -> None:
    """In the place of SGLang's function of that name, which `launch_server` takes as an argument."""
    scheduler = Scheduler(server_args, port_args)
    ranks_and_writer[-1].send(_READY)
    scheduler.run()
