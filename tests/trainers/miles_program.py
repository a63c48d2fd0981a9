"""miles' own data source, group of rollouts and conversion into training data, with rollouts on Turnlog.

What needs a GPU is left out: its rollout manager. Of SGLang a module is put in the place of one that no release has.
"""

from __future__ import annotations

import asyncio
import os
import sys
import types
from argparse import Namespace
from typing import Any

ABSENT = "sglang.srt.entrypoints.openai.encoding_dsv4"
if ABSENT not in sys.modules:
    sys.modules[ABSENT] = types.ModuleType(ABSENT)
    serving: Any = __import__("sglang.srt.entrypoints.openai", fromlist=["openai"])
    serving.encoding_dsv4 = sys.modules[ABSENT]

from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data  # noqa: E402
from miles.rollout.data_source import RolloutDataSource  # noqa: E402
from miles.rollout.generate_hub import agentic_tool_call  # noqa: E402
from miles.rollout.inference_rollout.inference_rollout_common import (  # noqa: E402
    GenerateState,
    generate_and_rm_group,
)
from miles.utils import types  # noqa: E402
from miles.utils.http_utils import init_http_client  # noqa: E402
from miles.utils.misc import load_function  # noqa: E402

from trainers import playing, slime_program  # noqa: E402

DEFAULTS: dict[str, Any] = {
    **slime_program.DEFAULTS,
    "chat_template_path": None,
    "eval_num_gpus": 0,
    "multi_lora_n_adapters": 0,
    "custom_generate_function_path": "turnlog.integrations.miles.generate",
    "max_seq_len": None,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "sglang_router_policy": None,
    "sglang_speculative_algorithm": None,
    "use_dynamic_global_batch_size": False,
    "use_distributed_post": False,
    "use_session_server": False,
}


class WeightVersionsPerCall:
    """As miles has it since September 2026: made of the spans of a turn."""

    from_dicts = staticmethod(list[dict[str, Any]])


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """The training data of each of `rollouts`, and what its samples say. `spans`: as newer miles."""
    if asked["args"].pop("spans", False):
        types.WeightVersionsPerCall = WeightVersionsPerCall
    agent = os.environ["TURNLOG_AGENT"].replace(":", ".")
    args = Namespace(**{**DEFAULTS, "custom_agent_function_path": agent, **asked["args"]})
    init_http_client(args)
    state, source = GenerateState(args), RolloutDataSource(args)
    return {"rollouts": [_rollout(state, source) for _ in asked["rollouts"]]}


def _rollout(state: Any, source: Any) -> dict[str, Any]:
    async def groups() -> list[Any]:
        playing = (
            generate_and_rm_group(state, group, state.sampling_params)
            for group in source.get_samples(state.args.rollout_batch_size)
        )
        return await asyncio.gather(*playing)

    given = [one for group in asyncio.run(groups()) for one in group]
    samples = [sample for one in given for sample in (one if isinstance(one, list) else [one])]
    for sample in samples:
        sample.validate()
    told = [sample.to_dict() for sample in samples]
    path = state.args.custom_reward_post_process_path
    data = convert_samples_to_train_data(state.args, samples, {}, None, path and load_function(path))
    experts = [one.tolist() for one in data.get("rollout_routed_experts", ())]
    data = {
        name: data[name]
        for name in (
            "tokens",
            "response_lengths",
            "rewards",
            "raw_reward",
            "rollout_ids",
            "sample_indices",
            "loss_masks",
            "rollout_log_probs",
        )
    }
    return {
        **data,
        "rollout_routed_experts": experts,
        "samples": [{name: one[name] for name in slime_program.KEPT} for one in told],
    }


async def driver(input: Any) -> Any:
    """miles' own driver, told that Turnlog is its session server."""
    input.args.session_server_ip, input.args.session_server_ports = (
        input.args.sglang_router_ip,
        [input.args.sglang_router_port],
    )
    return await agentic_tool_call.generate(input)


async def plain(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """An agent of miles' driver, which tells it no more than the address."""
    told = {**metadata, "api_key": "EMPTY", "session_id": base_url.rsplit("/", 1)[1]}
    return {"reward": await playing.run(base_url, prompt, request_kwargs, told)}


async def reward(args: Any, sample: Any) -> float:
    """As miles' examples: what the agent left in the metadata."""
    found: float = sample.metadata["reward"]
    return found
