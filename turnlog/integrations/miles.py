"""miles' generate function on Turnlog, without its session server: `--custom-generate-function-path
turnlog.integrations.miles.generate --custom-agent-function-path my.agent.run`.

What is told beside: as in `turnlog.integrations.slime`.
"""

from __future__ import annotations

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub import agentic_tool_call
from miles.utils import types

from turnlog.integrations.slime import samples_of, version_calls


async def generate(input: GenerateFnInput) -> GenerateFnOutput:  # miles' name
    """As slime's. Raises TurnlogError and what `rollout` raises."""
    args = input.args
    samples, rows = await samples_of(
        input.state,
        input.sample,
        input.sampling_params,
        input.evaluation,
        step=None,
        longest=getattr(args, "max_seq_len", None),
        agent=args.custom_agent_function_path,
    )
    for sample in samples:
        sample.non_generation_time = (sample.metadata.get("agent_metrics") or {}).get("total_tool_time", 0.0)
    if calls := getattr(types, "WeightVersionsPerCall", None):  # since September 2026
        for sample, row in zip(samples, rows, strict=False):
            sample.weight_versions = [calls.from_dicts(spans) for spans in version_calls(row)]
    return GenerateFnOutput(samples=samples[0] if args.partial_rollout and not input.evaluation else samples)


generate.add_arguments = agentic_tool_call.generate.add_arguments  # type: ignore[attr-defined]
