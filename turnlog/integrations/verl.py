"""verl's agent loop (0.9) on Turnlog: each rollout that its classic or its V1 worker asks for is an agent in a session.

In verl's configuration: `actor_rollout_ref.rollout.agent.default_agent_loop=turnlog`, `+turnlog.agent=my.agent:run` and
`actor_rollout_ref.rollout.agent.agent_loop_config_path=turnlog/integrations/verl.yaml`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from turnlog import AsyncTurnlog
from turnlog.client.address import default_run
from turnlog.errors import NotFound
from turnlog.integrations.engines import take_engine
from turnlog.rollouts import PATIENCE_S, Outcome, name_of, rollout

log = logging.getLogger("turnlog.integrations.verl")

EVALUATION_SPLITS = ("test", "val", "validation")
"""verl tells no agent loop that it validates; its data sets name their split in `extra_info`."""

REGISTERED_S = 5.0
"""How long a process takes verl's list of servers for Turnlog's."""


class RolloutFailed(Exception):
    """V1's worker logs it, and gives the prompt's group verl's status `failure`."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Of `turnlog.rollout`: agent, command, timeout_s, retry_failed, run (by default `TURNLOG_RUN`; one is required).

    failed: `drop`: in V1 the group gets verl's `failure`; the classic worker has a row for every rollout, which is then
        masked, with the reward 0, or verl's where verl judges the others. `keep`: as any other; without a reward verl's
        reward function is asked.
    rewards: `turn` puts rewards of turns into V1's `rm_scores`.
    rows: of a rollout of several rows the classic worker gets the `longest`, which trains most tokens, or `refuse`s it.
    engines: `verl`: those of verl's load balancer are the run's; `own`: somebody else adds them.
    max_agents: of each worker at a time.
    session: more fields of the session, such as `model` or `limits`.
    """

    agent: str | None = None
    command: str | list[str] | None = None
    run: str | None = None
    timeout_s: float | None = None
    retry_failed: int = 0
    failed: Literal["drop", "keep"] = "drop"
    rewards: Literal["total", "turn"] = "total"
    rows: Literal["longest", "refuse"] = "longest"
    engines: Literal["verl", "own"] = "verl"
    max_agents: int = 512
    session: dict[str, Any] = field(default_factory=dict)


class TurnlogOutput(AgentLoopOutput):  # type: ignore[misc]  # verl has no types
    """verl makes `rm_scores` of `reward_score`, at the last token; here they stand where turns earned them."""

    rm_scores: list[float] | None = None

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().as_dict()
        if self.rm_scores is not None:
            found["rm_scores"] = torch.tensor(self.rm_scores)
        return found


@dataclass
class _Worker:
    """What the rollouts of a worker share, for each of which verl makes an agent loop.

    own: verl's servers when it was last asked. experts: layers and k of routed experts.
    is_judged: does verl's reward function judge? Known from the first rollout that did not fail.
    """

    turnlog: AsyncTurnlog
    places: asyncio.Semaphore
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)
    registered_at: float = -math.inf
    own: set[str] = field(default_factory=set)
    ended: asyncio.Condition = field(default_factory=asyncio.Condition)
    playing: int = 0
    is_judged: bool | None = None
    experts: tuple[int, ...] | None = None

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        self.playing += 1
        try:
            async with self.places:
                yield
        finally:
            self.playing -= 1
            async with self.ended:
                self.ended.notify_all()

    async def hear_of_others(self) -> None:
        """Wait until a rollout has not failed, or none is left: a row without one must fit to theirs."""
        async with self.ended:
            await self.ended.wait_for(lambda: self.is_judged is not None or not self.playing)

    async def register_engines(self, balancer: Any, run: str) -> None:
        """Of those that verl does not have any more, these go: what it had before, and, of a start before, what is
        dead. Raises ValueError for an engine that another run has taken since it was this run's, or does not give."""
        async with self.registering:
            if time.monotonic() - self.registered_at < REGISTERED_S:
                return
            listed = {engine["url"]: engine for engine in await self.turnlog.engines()}
            urls = {f"http://{address}" for address in await balancer.get_all_servers.remote()}
            for url in sorted(urls):
                whose = listed[url]["run"] if url in listed else ...
                if whose != run and url in self.own and url in listed:
                    raise ValueError(
                        f"engine {url} of run {run} was given to {f'run {whose}' if whose else 'all runs'}"
                    )
                if whose != run:
                    await take_engine(self.turnlog, url, run)
            for url, engine in listed.items():
                if engine["run"] == run and url not in urls and (url in self.own or engine["health"] == "dead"):
                    with contextlib.suppress(NotFound):
                        await self.turnlog.remove_engine(url)
            self.own, self.registered_at = urls, time.monotonic()


@cache
def _worker(servers: Any, loop: asyncio.AbstractEventLoop, max_agents: int) -> _Worker:
    """verl gives all agent loops of a worker the same client of its servers."""
    return _Worker(AsyncTurnlog(retry_for_s=PATIENCE_S), asyncio.Semaphore(max_agents))


@cache
def _say_evaluation(split: str) -> None:
    log.warning(
        'rollouts whose extra_info.split is "%s" are evaluations: feeds and exports to train on lack them', split
    )


class TurnlogAgent(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """`turnlog`: parameters of the YAML file; those of verl's own `turnlog` go before them. Raises TypeError for a name
    that is none of `Parameters`, ValueError where no run is named."""

    def __init__(self, *given: Any, turnlog: Mapping[str, Any] | None = None, **of_verl: Any) -> None:
        super().__init__(*given, **of_verl)
        merged = OmegaConf.merge(turnlog or {}, self.config.get("turnlog") or {})
        self._own = Parameters(**OmegaConf.to_container(merged, resolve=True))
        run = self._own.run or default_run()
        if not run:  # Else two trainings would sample from each other's engines.
            raise ValueError("the rollouts have no run: set +turnlog.run, or TURNLOG_RUN, to a name of this training")
        self._run = run

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """All rows for V1's worker, one for the classic one. Raises RolloutFailed, TurnlogError, ValueError, and what
        `load` raises."""
        own, is_v1 = self._own, "session_id" in fields
        said = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in fields.items()}
        prompt = [dict(message) for message in said.pop("raw_prompt")]
        uid = str(said.get("uid") or uuid4())
        attempt = said.pop("session_id", said.get("priority"))
        split = (said.get("extra_info") or {}).get("split")
        if is_evaluation := split in EVALUATION_SPLITS:
            _say_evaluation(split)
        # Of these an engine may have others of its own; OpenAI's client takes neither as an argument.
        always = {name: sampling_params[name] for name in ("top_k", "repetition_penalty") if name in sampling_params}
        asked = {name: value for name, value in sampling_params.items() if name not in always}
        session = {"run": self._run, "on_abort": "fail", **own.session}
        session["params"] = {**always, **(session.get("params") or {})}
        export: dict[str, Any] = {"rewards": own.rewards}
        if is_replayed := bool(self.rollout_config.get("enable_rollout_routing_replay")) and not is_evaluation:
            export["replay"] = True
        if self.processor is not None:
            export["images"] = "inline"
        worker = _worker(self.server_manager, asyncio.get_running_loop(), own.max_agents)
        async with worker.place():
            began = time.monotonic()
            if own.engines == "verl":
                await worker.register_engines(self.server_manager._load_balancer, self._run)
            rows, outcome = await rollout(
                own.agent,
                prompt,
                # verl's fully asynchronous trainer says no attempt, and its uids come again in another training.
                name=str(uuid4()) if attempt is None else name_of(uid, attempt),
                shape="verl",
                command=own.command,
                sampling={"max_tokens": self.rollout_config.response_length, **asked},
                metadata=said,
                step=said.get("global_steps"),
                group_id=uid,
                attempt=attempt,
                evaluation=is_evaluation,
                timeout_s=own.timeout_s,
                retry_failed=own.retry_failed,
                export=export,
                turnlog=worker.turnlog,
                **session,
            )
            seconds = time.monotonic() - began
            if outcome.failed is None:
                worker.is_judged = outcome.reward is None
            if rows and rows[0].get("routed_experts") is not None:
                worker.experts = np.shape(rows[0]["routed_experts"])[1:]
        is_dropped = not rows or (outcome.failed is not None and own.failed == "drop")
        if is_dropped and is_v1:
            raise RolloutFailed(f"session {outcome.session_id}: {outcome.failed or outcome.status}") from outcome.error
        if is_dropped:
            await worker.hear_of_others()
        rows = rows or [self._nothing(outcome, (worker.experts or self._experts()) if is_replayed else None)]
        step = said.get("global_steps")
        # A step samples of the version before it; a validation is of the version that its step has made.
        version = 0 if step is None else step if is_evaluation else step - 1
        outputs = [_output(row, seconds, version) for row in rows]
        if is_v1:
            return outputs
        one = self._one(outputs, is_dropped)
        if is_dropped:
            one.reward_score = None if worker.is_judged else 0.0
        return one

    def _nothing(self, outcome: Outcome, experts: tuple[int, ...] | None) -> dict[str, Any]:
        """A row of two tokens outside the loss: the classic worker has no rollout without one."""
        some = [self.tokenizer.pad_token_id or 0]
        said = {"session_id": outcome.session_id, "status": outcome.status, "failed": outcome.failed}
        row: dict[str, Any] = {
            "prompt_ids": some,
            "response_ids": some,
            "response_mask": [0],
            "response_logprobs": [0.0],
        }
        if experts is not None:
            row["routed_experts"] = np.zeros((1, *experts), dtype=np.int64)
        return {**row, "extra_fields": said}

    def _experts(self) -> tuple[int, int]:
        """Layers and k by the model's configuration. Raises ValueError."""
        path = self.config.actor_rollout_ref.model.path
        config = AutoConfig.from_pretrained(path).get_text_config()
        layers, k = config.num_hidden_layers, getattr(config, "num_experts_per_tok", None)
        if k is None:
            raise ValueError(f"no rollout has routed experts, and {path} names no num_experts_per_tok: replay nothing")
        return layers, k

    def _one(self, outputs: list[TurnlogOutput], is_dropped: bool) -> TurnlogOutput:
        """The classic worker takes one row, and pads it to `prompt_length` and `response_length`. The rest of a longer
        prompt begins the response, outside the loss; a longer response is cut. Raises ValueError."""
        if len(outputs) > 1 and self._own.rows == "refuse":
            raise ValueError(f"session {outputs[0].extra_fields['turnlog']['session_id']} has {len(outputs)} rows")
        trained = sum(sum(output.response_mask) for output in outputs)
        one = max(outputs, key=lambda output: sum(output.response_mask))
        moved = one.prompt_ids[self.rollout_config.prompt_length :]
        one.prompt_ids = one.prompt_ids[: self.rollout_config.prompt_length]
        end = self.rollout_config.response_length
        one.response_ids = (moved + one.response_ids)[:end]
        one.response_mask = ([0] * len(moved) + one.response_mask)[:end]
        one.response_logprobs = ([0.0] * len(moved) + one.response_logprobs)[:end]
        if one.routed_experts is not None:
            one.routed_experts = np.asarray(one.routed_experts)[: len(one.prompt_ids) + len(one.response_ids)]
        if is_dropped:
            one.response_mask = [0] * len(one.response_mask)
        left_out = {"rows_left_out": len(outputs) - 1, "tokens_left_out": trained - sum(one.response_mask)}
        if any(left_out.values()):
            log.warning("verl gets one row of session %s: %s", one.extra_fields["turnlog"]["session_id"], left_out)
        one.extra_fields.update(left_out)
        return one


def _output(row: dict[str, Any], seconds: float, version: int) -> TurnlogOutput:
    """The same names in every `extra_fields`, since verl makes columns of them. `version`: of weights where no reply
    names one that is a number. Raises ValueError for experts that were asked for and are not there."""
    of_row = dict(row["extra_fields"])
    if row.get("routed_experts") is None and of_row.get("routed_experts_missing"):
        raise ValueError(f"session {of_row['session_id']}: no routed experts: {of_row['routed_experts_missing']}")
    named = of_row.get("weight_versions") or []
    versions = [int(one) for one in named] if named and all(map(str.isdecimal, named)) else [version]
    extra = {
        "turn_scores": of_row.pop("turn_scores", []),
        "tool_rewards": [],
        "reward_extra_info": of_row.pop("reward_extra_info", {}),
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        "turnlog": of_row,
    }
    return TurnlogOutput(**{**row, "metrics": {"generate_sequences": seconds}, "extra_fields": extra})
