"""AReaL's workflow (1.0) on Turnlog: an episode is a rollout, its trajectory the rollout's rows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors

from turnlog import AsyncTurnlog, name_of, rollout
from turnlog.client.address import default_run
from turnlog.errors import NotFound
from turnlog.rollouts import PATIENCE_S, life

log = logging.getLogger("turnlog.integrations.areal")

DTYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.int64,
    "versions": torch.int64,
    "logprobs": torch.float32,
    "rewards": torch.float32,
    "attention_mask": torch.bool,
}

NO_TOP_K = 10**8
"""AReaL's default of `top_k`."""


class TurnlogWorkflow(RolloutWorkflow):  # type: ignore[misc]  # AReaL has no types
    """`train(workflow="turnlog.integrations.areal.TurnlogWorkflow", workflow_kwargs={"agent": "my.agent:run"})`.

    agent: its import path; by default `TURNLOG_AGENT`. options: more arguments of `turnlog.rollout`, such as `command`,
        `run`, `failed`, `retry_failed` and `timeout_s`; `sampling` and `metadata` are put over AReaL's.
    gconfig: AReaL's sampling parameters. prompt: the column with the agent's prompt. id: the column that tells rows of
        the data set apart; without it their content does. url: Turnlog's address; by default `TURNLOG_URL`.
    """

    def __init__(
        self,
        agent: str | None = None,
        *,
        gconfig: Any = None,
        prompt: str = "messages",
        id: str | None = None,
        url: str | None = None,
        **options: Any,
    ) -> None:
        is_mapping = gconfig is None or isinstance(gconfig, Mapping)
        sampling = dict(gconfig or {}) if is_mapping else dataclasses.asdict(gconfig)
        sampling.pop("max_tokens", None)  # AReaL's counts the prompt, too.
        if sampling.get("top_k") == NO_TOP_K:
            del sampling["top_k"]
        if sampling.get("greedy"):
            sampling["temperature"] = 0.0
        sampling |= options.pop("sampling", None) or {}
        self._metadata = options.pop("metadata", None) or {}
        self._options: dict[str, Any] = {"agent": agent, "sampling": sampling, **options}
        self._prompt, self._id, self._url = prompt, id, url

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """The rollout's rows, padded to one length; None, which rejects the trajectory, without a row that has a
        reward. Raises TurnlogError, and TypeError for a row that is no JSON and has no `id`."""
        version, phase = engine.get_version(), workflow_context.stat_scope()
        row_id = json.dumps(data, sort_keys=True) if self._id is None else str(data[self._id])
        group = name_of(*life(self._options.get("run")), phase, version, name_of(row_id))
        # One workflow may be made for each prompt, so the engine counts. A row may come again with the same weights.
        counted: dict[int, Counter[str]] = vars(engine).setdefault("_turnlog_attempts", {})
        if version not in counted:
            counted.clear()
        attempts = counted.setdefault(version, Counter())
        attempt = attempts[group]
        attempts[group] += 1
        is_evaluation = workflow_context.get().is_eval
        name = name_of(group, attempt, uuid.uuid4().hex) if is_evaluation else name_of(group, attempt)
        async with AsyncTurnlog(self._url, retry_for_s=PATIENCE_S) as turnlog:
            await self._add_engines(turnlog, engine)
            rows, outcome = await rollout(
                prompt=data[self._prompt],
                name=name,
                shape="areal",
                metadata={key: value for key, value in data.items() if key != self._prompt} | self._metadata,
                step=version,
                group_id=group,
                attempt=attempt,
                evaluation=is_evaluation,
                turnlog=turnlog,
                **self._options,
            )
        if outcome.reward is not None:
            stats_tracker.get(phase).scalar(reward=outcome.reward)
        return concat_padded_tensors([_trajectory(row, version) for row in rows]) if rows else None

    async def _add_engines(self, turnlog: AsyncTurnlog, engine: Any) -> None:
        """Once for each set of addresses: AReaL's servers have other ports after each start, so this run's dead ones
        are removed. Without a run they would be everybody's, and are not added."""
        run, urls = self._options.get("run") or default_run(), {f"http://{address}" for address in engine.addresses}
        async with vars(engine).setdefault("_turnlog_adding", asyncio.Lock()):
            if vars(engine).get("_turnlog_added") == urls:
                return
            if run in (None, "default"):
                log.warning("no run is named (run=, TURNLOG_RUN): AReaL's servers %s are not added", sorted(urls))
            else:
                listed = await turnlog.engines(run=run)
                for url in urls - {one["url"] for one in listed}:
                    await turnlog.add_engine(url, run=run)
                for one in listed:
                    if one["run"] == run and one["health"] == "dead" and one["url"] not in urls:
                        with contextlib.suppress(NotFound):  # Another of AReaL's processes removed it.
                            await turnlog.remove_engine(one["url"])
            engine._turnlog_added = urls


def _trajectory(row: Mapping[str, Any], version: int) -> dict[str, torch.Tensor]:
    """`version`: of tokens whose engine named no number."""
    tensors = {name: torch.tensor(row[name], dtype=dtype) for name, dtype in DTYPES.items()}
    if row["weight_version_names"]:
        tensors["versions"][tensors["versions"] >= 0] = version
    return tensors
