"""OpenPipe ART: `trajectory("my.agent:run", prompt, model=model, name="…")` in the place of a rollout function.

A trajectory has a `ChatCompletionsExchange` for each turn in the loss, with the engine's ids and logprobs: ART's
tokenizer adds none of its own.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from art import Trajectory
from art.preprocessing.moe_routing import (
    attach_moe_routing_metadata_to_choice,
    moe_route_dtype,
)
from art.trajectories import ChatCompletionsExchange, TrajectoryExchanges
from openai.types.chat import ChatCompletion

from turnlog.rollouts import Agent, Rollout, rollout
from turnlog.trees import unpack_tree


class RolloutFailed(Exception):
    """An agent failed, or played no turn; ART counts it among its group's exceptions."""


async def trajectory(
    agent: Agent | str | None,
    prompt: Any,
    *,
    model: Any,
    name: str,
    failed: Literal["keep", "drop"] = "drop",
    num_experts: int | None = None,
    **of_rollout: Any,
) -> Trajectory:
    """Play the agent on a prompt, once under this name.

    model: ART's, or the name that its inference has; the agent finds it in `metadata["model"]`.
    failed: `drop` raises RolloutFailed, from the agent's exception; `keep` has its turns, and `failed` in the metrics.
    num_experts: how many experts a layer of the model has, to replay those that the engine named.
    of_rollout: more arguments of `turnlog.rollout`.

    Raises RolloutFailed, also where no turn is in the loss, ValueError with `num_experts` where the engine named no
    experts, and TurnlogError.
    """
    served = model if isinstance(model, str) else model.get_inference_name()
    played = await rollout(
        agent,
        prompt,
        name=name,
        shape="tree",
        failed=failed,
        metadata={**(of_rollout.pop("metadata", None) or {}), "model": served},
        export={"replay": num_experts is not None, **(of_rollout.pop("export", None) or {})},
        **of_rollout,
    )
    exchanges = exchanges_of(played, served, num_experts)
    outcome = played.outcome
    if not exchanges:
        why = outcome.failed.get("message") if outcome.failed is not None else "none of its turns is in the loss"
        raise RolloutFailed(f"session {outcome.session_id}: {why}") from outcome.error
    [tree] = played.rows
    versions = [int(name) for name in tree["weight_version_names"] if name.isdigit()] or [
        version for version in tree["weight_versions"] if version >= 0 and not tree["weight_version_names"]
    ]
    return Trajectory(
        exchanges=TrajectoryExchanges(chat_completions=exchanges),
        reward=outcome.reward or 0.0,
        initial_policy_version=min(versions, default=None),
        final_policy_version=max(versions, default=None),
        metrics={**tree["reward_components"], "failed": outcome.failed is not None},
        metadata={"session_id": outcome.session_id, "group_id": tree["group_id"], "attempt": tree["attempt"]},
        logs=[] if outcome.failed is None else [str(outcome.failed)],
    )


def exchanges_of(played: Rollout, model: str, num_experts: int | None) -> list[ChatCompletionsExchange]:
    """Of a rollout in the shape `tree`: the turns that some row has in its loss, as the engine had them."""
    exchanges = []
    for tree in played.rows:
        conversations = _conversations(tree)
        for leaf, row in zip(tree["leaves"], unpack_tree(tree), strict=True):
            at = datetime.fromtimestamp(row["provenance"]["committed_at"], UTC)
            for turn in row["turns"]:
                if turn["turn"] not in leaf["loss_turns"] or turn["output_start"] == turn["end"]:
                    continue
                *asked, said = conversations[turn["turn"]]
                prompt = row["tokens"][: turn["output_start"]]
                output = slice(turn["output_start"], turn["end"])
                choice = {
                    "index": 0,
                    "finish_reason": "length" if turn["finish_reason"] == "length" else "stop",
                    "message": said,
                    "prompt_token_ids": prompt,
                    "token_ids": row["tokens"][output],
                    "compact_logprobs": row["logprobs"][output],
                }
                fields = {
                    "id": f"{row['session_id']}.{turn['turn']}",
                    "object": "chat.completion",
                    "created": int(at.timestamp()),
                    "model": model,
                    "choices": [choice],
                }
                reply = ChatCompletion.model_validate(fields)
                if num_experts is not None:
                    if row.get("routed_experts") is None:
                        raise ValueError(f"session {row['session_id']} has no routed experts to replay")
                    attach_moe_routing_metadata_to_choice(
                        choice=reply.choices[0],
                        response_payload={"prompt_token_ids": prompt, "choices": [choice]},
                        routed_experts=_experts(row, turn["end"], num_experts),
                        num_experts=num_experts,
                    )
                request = {"model": model, "messages": asked}
                exchanges.append(ChatCompletionsExchange(request=request, response=reply, start_time=at, end_time=at))
    return exchanges


def _conversations(tree: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The messages up to each turn's reply."""
    found: dict[int, list[dict[str, Any]]] = {}
    for turn in tree["turns"]:
        found[turn["turn"]] = [*found.get(turn["parent"], [])[: turn["first_message"]], *turn["messages"]]
    return found


def _experts(row: Mapping[str, Any], end: int, num_experts: int) -> np.ndarray[Any, Any]:
    """[tokens, layers, k] of the row's first `end` tokens, or all but the last of them."""
    data = base64.b64decode(row["routed_experts"])
    found = np.frombuffer(data, row["dtype"]).reshape(row["shape"])
    return found[:end].astype(moe_route_dtype(num_experts))
