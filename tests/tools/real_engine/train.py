"""Train a Qwen3 of two layers until it calls its tool: `python -m tests.tools.real_engine.train FOLDER`.

It takes about a minute. `FOLDER` holds the tokenizer and gets the model. It runs in the engine's environment, which has
PyTorch.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.tools.real_engine import weather

BATCH = 8
CHECK_EVERY = 50
CHECKS = 12
MOST_STEPS = 1000
IGNORED = -100
"""The label of a token that has no part in the loss."""


class ModelDidNotLearn(Exception):
    """After all steps the model does not call its tool."""


def main(folder: Path) -> None:
    torch.manual_seed(1)
    rng = random.Random(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM(_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, MOST_STEPS + 1):
        tokens, labels = _batch(rng, tokenizer)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % CHECK_EVERY == 0 and _has_learned(model, tokenizer):
            model.save_pretrained(folder)
            print(f"learned in {step} steps, loss {loss.item():.3f}")
            return
    raise ModelDidNotLearn


def _config(tokenizer: Any) -> Any:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )


def _batch(rng: random.Random, tokenizer: Any) -> tuple[Any, Any]:
    """Tokens and labels [BATCH, T]; behind a shorter conversation stand tokens that nothing attends to."""
    examples = [_example(rng, tokenizer) for _ in range(BATCH)]
    width = max(len(tokens) for tokens, _ in examples)
    tokens = [one + [0] * (width - len(one)) for one, _ in examples]
    labels = [one + [IGNORED] * (width - len(one)) for _, one in examples]
    return torch.tensor(tokens), torch.tensor(labels)


def _example(rng: random.Random, tokenizer: Any) -> tuple[list[int], list[int]]:
    """One generation somewhere in a conversation, its prompt rendered as the engine will; the loss is on the output."""
    with_tool = rng.random() < 0.75
    prompt, message = _generation(rng, tokenizer, with_tool=with_tool, calls=with_tool and rng.random() < 0.5)
    output = tokenizer.encode(weather.output_of(message), add_special_tokens=False)
    return prompt + output, [IGNORED] * len(prompt) + output


def _generation(
    rng: random.Random, tokenizer: Any, *, with_tool: bool, calls: bool
) -> tuple[list[int], weather.Message]:
    """A prompt and the message that follows; `calls`: one that calls the tool."""
    rounds = [weather.round_trip(rng, with_tool=with_tool) for _ in range(rng.randint(1, 5))]
    messages = [message for one in rounds for message in one]
    at = len(messages) - (3 if calls else 1)
    ids: list[int] = tokenizer.apply_chat_template(
        messages[:at], tools=[weather.TOOL] if with_tool else None, add_generation_prompt=True, return_dict=False
    )
    return ids, messages[at]


def _has_learned(model: Any, tokenizer: Any) -> bool:
    """Does it call the tool wherever it should, as it will be sampled?"""
    rng = random.Random(2)
    for _ in range(CHECKS):
        ids, _ = _generation(rng, tokenizer, with_tool=True, calls=True)
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=mask, max_new_tokens=64, do_sample=True, top_k=0)
        text = tokenizer.decode(output[0, len(ids) :])
        if not (text.startswith('<tool_call>\n{"name": "weather"') and text.endswith("}}\n</tool_call><|im_end|>")):
            return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
