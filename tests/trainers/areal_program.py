"""AReaL's own engine, executor and grouped workflow (areal 1.0.4), with rollouts on Turnlog."""

from __future__ import annotations

from typing import Any

from areal.api.cli_args import InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """The trajectories of a batch, as lists; and the rewards that AReaL's tracker has."""
    engine = RemoteSGLangEngine(
        InferenceEngineConfig(backend="sglang:d1", check_trajectory_format=True, max_concurrent_rollouts=64)
    )
    engine.initialize(addr=asked["engine"].removeprefix("http://"), train_data_parallel_size=1)
    engine.set_version(asked["version"])
    ids = [
        engine.submit(
            row,
            workflow="turnlog.integrations.areal.TurnlogWorkflow",
            workflow_kwargs=asked["workflow_kwargs"],
            group_size=asked["group_size"],
            is_eval=asked["evaluation"],
        )
        for row in asked["rows"]
    ]
    found = [engine.wait_for_task(one, timeout=200) for one in ids]
    kept = [one for one in found if one is not None]
    whole = concat_padded_tensors(kept)
    check_trajectory_format(whole, batch_size=sum(len(one["rewards"]) for one in kept))
    return {
        "groups": [one and {name: tensor.tolist() for name, tensor in one.items()} for one in found],
        "dtypes": {name: str(tensor.dtype) for name, tensor in whole.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in whole.items()},
        "stats": stats_tracker.get("rollout").export(),
    }
