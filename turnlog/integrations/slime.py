"""slime's and vime's generate function: `--custom-generate-function-path turnlog.integrations.slime.generate`.

`TURNLOG_AGENT` names the agent, `TURNLOG_URL` the server, or several with commas between them, `TURNLOG_RUN` the run. A
file of `--custom-config-path` may have more arguments of `turnlog.rollout` under the key `turnlog`; its `metadata`,
`sampling` and `export` are put over the trainer's.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import importlib
import itertools
import logging
import os
import statistics
import sys
import uuid
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnlog import AsyncTurnlog, name_of, rollout
from turnlog.rollouts import PATIENCE_S, life

log = logging.getLogger("turnlog.integrations.slime")

ASKED = "turnlog_asked"
"""In a sample's metadata: how often this process has asked for it. A trainer that asks again wants another rollout."""

STATES = {"slime": "slime.rollout.sglang_rollout", "vime": "vime.rollout.vllm_rollout"}


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """The rollout as samples, one for each row; with `--partial-rollout` the one, as slime's buffer takes no lists.

    Raises TurnlogError and what `rollout` raises.
    """
    root = type(sample).__module__.partition(".")[0]
    state = importlib.import_module(STATES[root]).GenerateState(args)
    step = getattr(sys.modules.get(f"{root}.rollout.sample_hooks"), "_current_rollout_id", None)
    longest = getattr(args, "eval_max_context_len" if evaluation else "rollout_max_context_len", None)
    samples, _ = await samples_of(state, sample, sampling_params, evaluation, step=step, longest=longest)
    return samples[0] if args.partial_rollout and not evaluation else samples


async def samples_of(
    state: Any,
    sample: Any,
    sampling: Mapping[str, Any],
    evaluation: bool,
    *,
    step: int | None,
    longest: int | None,
    agent: str | None = None,
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The sample's rollout as samples, and their rows. `state`: the trainer's, with `args`, `tokenizer` and `aborted`.

    Where there is nothing to train, one sample of two tokens that `remove_sample` keeps out of the loss, and no row.
    """
    args, options = state.args, {**(getattr(state.args, "turnlog", None) or {})}
    known = dict(sample.metadata or {})
    asked = known.pop(ASKED, 0)
    sample.metadata = {**known, ASKED: asked + 1}
    is_known = not evaluation and sample.index is not None  # An evaluation counts its samples anew.
    phase = "eval" if evaluation else "train"
    group = name_of(*life(options.get("run")), phase, sample.group_index if is_known else uuid.uuid4().hex)
    replay = bool(getattr(args, "use_rollout_routing_replay", False)) and not evaluation
    merged: dict[str, Any] = {
        "metadata": {**known, "label": sample.label, "max_seq_len": longest},
        "sampling": sampling,
        "export": {"max_seq_len": longest, "truncate": "token", "replay": replay or None},
    }
    merged = {option: {**given, **(options.pop(option, None) or {})} for option, given in merged.items()}
    name = name_of(group, sample.index, asked)
    urls = os.environ.get("TURNLOG_URL", "").split(",")
    url = urls[zlib.crc32(name.encode()) % len(urls)] or None
    async with AsyncTurnlog(url, retry_for_s=PATIENCE_S) as turnlog:
        playing = asyncio.create_task(
            rollout(
                options.pop("agent", agent),
                sample.prompt,
                name=name,
                step=step,
                group_id=group,
                attempt=sample.index,
                evaluation=evaluation,
                turnlog=turnlog,
                **merged,
                **options,
            )
        )
        aborting = asyncio.create_task(_aborted(state))
        try:
            await asyncio.wait((playing, aborting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_aborted = not playing.done()
            for task in (playing, aborting):
                task.cancel()
            await asyncio.wait((playing, aborting))
    if is_aborted:
        sample.status = sample.Status.ABORTED
        return [sample], []
    rows, outcome = playing.result()
    told = outcome.result if isinstance(outcome.result, Mapping) else {}
    beside = {"session_id": outcome.session_id, "failed": outcome.failed}
    sample.metadata = {**sample.metadata, **told, "turnlog": beside}
    samples = [_filled(state, sample, row) for row in rows]
    has_experts = not replay or all(_put_experts(*pair) for pair in zip(samples, rows, strict=True))
    if why := _why_untrained(args, rows, has_experts, evaluation):
        log.warning("session %s is left out of the loss: %s", outcome.session_id, why)
        # slime asks for an aborted one again, and that may have rows.
        samples, rows = [_empty(args, sample, sample.Status.FAILED if rows else sample.Status.ABORTED)], []
    reward = outcome.reward
    if reward is None and (outcome.failed or why or any(one.status == one.Status.ABORTED for one in samples)):
        reward = 0.0  # slime reckons with a number, and asks no reward model if one row was aborted.
        for one in samples:
            one.remove_sample = True
    key = (evaluation and getattr(args, "eval_reward_key", None)) or getattr(args, "reward_key", None)
    for one in samples:
        one.reward = reward if reward is None or not key else {key: reward, **(told.get("reward_components") or {})}
    return samples, rows


async def _aborted(state: Any) -> None:
    """slime tells nobody that it has begun to abort, and waits until every rollout has ended."""
    while not state.aborted:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


def _why_untrained(args: Any, rows: Sequence[Any], has_experts: bool, evaluation: bool) -> str | None:
    if not rows:
        return "it has no turn, or failed"
    if args.partial_rollout and len(rows) > 1 and not evaluation:
        return f"--partial-rollout has no room for its {len(rows)} rows"
    if not has_experts:
        return (
            "it lacks routed experts for some tokens: set TURNLOG_REPLAY=routed_experts, and "
            "TURNLOG_MOE_LAYERS and TURNLOG_MOE_TOPK for SGLang"
        )
    return None


def _filled(state: Any, sample: Any, row: Mapping[str, Any]) -> Any:
    one, start = copy.deepcopy(sample), row["prompt_length"]
    one.tokens, one.response_length = row["tokens"], row["response_length"]
    one.loss_mask, one.rollout_log_probs = row["loss_mask"][start:], row["logprobs"][start:]
    one.response = state.tokenizer.decode(row["tokens"][start:])
    one.weight_versions = [span["version"] for call in version_calls(row) for span in call]
    one.status = one.Status.FAILED if row["failed"] else one.Status(row["status"])
    one.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    one.remove_sample = False
    return one


def version_calls(row: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """For each turn the spans of its output that one weight version sampled, by their places in the row."""
    names, calls = row["weight_version_names"], []
    for turn in row["turns"]:
        places = range(turn["output_start"], min(turn["end"], len(row["tokens"])))
        runs = itertools.groupby(places, key=row["weight_versions"].__getitem__)
        found = [(version, list(of_it)) for version, of_it in runs]
        calls.append(
            [
                {"version": names[version] if names else str(version), "abs_start": at[0], "abs_end": at[-1] + 1}
                for version, at in found
            ]
        )
    return calls


def _put_experts(sample: Any, row: Mapping[str, Any]) -> bool:
    """int32 [T-1, layers, k]; False where the engines did not say them of every token."""
    if row.get("routed_experts") is None or row["row_start"] or row["rows"] != len(row["tokens"]) - 1:
        return False
    given = np.frombuffer(base64.b64decode(row["routed_experts"]), dtype=np.dtype(row["dtype"]).newbyteorder("<"))
    sample.rollout_routed_experts = given.reshape(row["shape"]).astype(np.int32)
    return True


def _empty(args: Any, sample: Any, status: Any) -> Any:
    """slime's batches have no room for a sample without tokens."""
    one = copy.deepcopy(sample)
    one.tokens, one.response_length, one.response = [0, 0], 1, ""
    one.loss_mask, one.rollout_log_probs, one.remove_sample = [0], [0.0], True
    one.status = status
    if getattr(args, "use_rollout_routing_replay", False):
        one.rollout_routed_experts = np.tile(np.arange(args.moe_router_topk, dtype=np.int32), (1, args.num_layers, 1))
    return one


def post_process_rewards(args: Any, samples: Sequence[Any], **_: Any) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: as slime normalises, but by group, a rollout of several rows once, and
    without samples that are removed, whose advantage is 0."""
    raw = [sample.get_reward_value(args) for sample in samples]
    centred = args.advantage_estimator in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if not (centred and args.rewards_normalization):
        return raw, raw
    groups: dict[Any, dict[Any, float]] = defaultdict(dict)
    for sample, reward in zip(samples, raw, strict=True):
        if not sample.remove_sample:
            groups[sample.group_index][sample.index] = reward
    found = []
    for sample, reward in zip(samples, raw, strict=True):
        of = list(groups[sample.group_index].values())
        centre = 0.0 if sample.remove_sample else reward - statistics.fmean(of)
        scaled = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
        found.append(centre / (statistics.stdev(of) + 1e-6) if scaled and len(of) > 1 else centre)
    return raw, found
