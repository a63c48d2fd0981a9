"""slime's own data source, rollout and conversion into training data, with rollouts on Turnlog.

What needs a GPU is left out: the manager's `__init__`, which starts engines, and what follows the conversion.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from openai import AsyncOpenAI
from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
from slime.ray.rollout import RolloutManager
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import init_http_client
from slime.utils.misc import load_function

from trainers import playing

DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "apply_chat_template": False,
    "apply_chat_template_kwargs": None,
    "buffer_filter_path": None,
    "ci_test": False,
    "custom_generate_function_path": "turnlog.integrations.slime.generate",
    "custom_reward_post_process_path": "turnlog.integrations.slime.post_process_rewards",
    "custom_rm_path": None,
    "dump_details": None,
    "dynamic_sampling_filter_path": None,
    "eval_max_prompt_len": None,
    "eval_reward_key": None,
    "group_rm": False,
    "grpo_std_normalization": True,
    "input_key": "prompt",
    "label_key": None,
    "load_debug_rollout_data": None,
    "mask_offpolicy_in_partial_rollout": False,
    "metadata_key": "metadata",
    "multimodal_keys": None,
    "n_samples_per_prompt": 2,
    "partial_rollout": False,
    "reward_key": None,
    "rewards_normalization": True,
    "rm_type": None,
    "rollout_all_samples_process_path": None,
    "rollout_batch_size": 2,
    "rollout_global_dataset": True,
    "rollout_max_prompt_len": None,
    "rollout_max_response_len": 40,
    "rollout_num_engines": 1,
    "rollout_sample_filter_path": None,
    "rollout_seed": 42,
    "rollout_shuffle": False,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_temperature": 0.9,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "sglang_dp_size": 1,
    "sglang_server_concurrency": 64,
    "tool_key": None,
    "use_distributed_post": False,
    "use_rollout_routing_replay": False,
}
"""As slime's parser has them, but for those of the test."""

COLUMNS = ("tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts")
KEPT = ("status", "metadata", "group_index", "index", "reward", "weight_versions", "response", "remove_sample")


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """The training data of each of `rollouts`, and what its samples say; the rewards of an evaluation."""
    args = Namespace(**{**DEFAULTS, "over_sampling_batch_size": 2, **asked["args"]})
    init_http_client(args)
    whole = RolloutManager.__ray_metadata__.modified_class
    manager = whole.__new__(whole)
    manager.args, manager.data_source = args, RolloutDataSourceWithBuffer(args)
    manager.generate_rollout = generate_rollout
    path = args.custom_reward_post_process_path
    manager.custom_reward_post_process_func = None if path is None else load_function(path)
    manager.custom_convert_samples_to_train_data_func = None
    found = []
    for rollout_id in asked["rollouts"]:
        set_current_rollout_id(rollout_id)
        samples, _ = manager._get_rollout_data(rollout_id)
        told = [{**one.to_dict(), "response_length": one.response_length} for one in samples]
        data = manager._convert_samples_to_train_data(samples)
        tensorize_rollout_data_for_training(data)
        for name in COLUMNS:
            data[name] = [tensor.tolist() for tensor in data.get(name, ())]
        del data["rollout_mask_sums"]
        found.append({**data, "samples": [{name: one[name] for name in KEPT} for one in told]})
    evaluated = []
    for number in asked.get("evaluations", ()):
        set_current_rollout_id(number)
        args.eval_datasets = [
            EvalDatasetConfig(
                name=name,
                path=args.prompt_data,
                input_key="prompt",
                metadata_key="metadata",
                top_k=-1,
                n_samples_per_eval_prompt=1,
                temperature=temperature,
                top_p=1.0,
                max_response_len=20,
            )
            for name, temperature in (("greedy", 0.0), ("sampled", 0.7))
        ]
        output = generate_rollout(args, number, manager.data_source, evaluation=True)
        evaluated.append(
            {
                name: [one.metadata["turnlog"]["session_id"] for one in data["samples"]]
                for name, data in output.data.items()
            }
        )
    return {"rollouts": found, "evaluations": evaluated}


async def aborted(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Two rows, of which the engine aborts the second; no reward."""
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=metadata["api_key"], max_retries=10) as client:
        for extra in ({}, {"sim": {"finish_reason": "abort"}}):
            again: Any = [{"role": "user", "content": f"{prompt[-1]['content']} {extra}"}]
            await client.chat.completions.create(model="simulator", messages=again, extra_body=extra)


async def several(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> float:
    """An agent that begins anew: as many rows as its prompt's `place` says, and one more."""
    reward = 0.0
    for place in range(metadata["place"] + 1):
        said = {**metadata, "what": "fine"}
        again = [{"role": "user", "content": f"Attempt {place} of {prompt[-1]['content']}"}]
        reward = await playing.run(base_url, again, dict(request_kwargs), said)
    return reward
