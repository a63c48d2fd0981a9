"""Make the policy that a run begins with: `python -m ops.train.model FOLDER`, in the engine's environment.

A Qwen3 of two layers learns from demonstrations of which many are wrong, so that it is right about one time in three.
It takes less than a minute.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from ops.train import task

STEPS, BATCH = 800, 32
RIGHT = 0.65
"""The share of demonstrations with the right tool; of those with the right argument; and of right answers."""

IGNORED = -100
"""The label of a token that has no part in the loss."""

_SPECIAL = ("<|im_start|>", "<|im_end|>")
_PLAIN = ("<tool_call>", "</tool_call>")
_TEMPLATE = """\
{%- if tools -%}
    {{- '<|im_start|>system\\nTools:' -}}
    {%- for tool in tools -%}
        {{- ' ' + tool.function.name + '(' -}}
        {{- tool.function.parameters.properties | join(', ') + ')' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n' if message.content or not loop.first -}}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def main(folder: Path) -> None:
    torch.manual_seed(1)
    rng = random.Random(1)
    _save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM(_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, 2 * (1 - step / STEPS))
        tokens, labels = _batch(rng, tokenizer)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    print(f"loss {loss.item():.3f} after {STEPS} steps")


def _save_tokenizer(folder: Path) -> None:
    """A byte-level BPE in which each word of the task is one token."""
    bpe = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(r" ?\p{L}+| ?[^\s\p{L}]+|\s+"), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    rng = random.Random(1)
    rounds = [_round(rng) for _ in range(500)]
    texts = [json.dumps(message, ensure_ascii=False) for round_ in rounds for message in round_]
    texts += [_output_of(message) for round_ in rounds for message in round_]
    nouns = " ".join(f"{name}( {name}(city)" for name in task.NOUNS)
    bpe.train_from_iterator(
        [*texts, f"\nTools: {nouns} system\nuser\nassistant\ntool\nsystem\nuser\nassistant\ntool\n"], trainer
    )
    bpe.add_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in _PLAIN])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE,
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _config(tokenizer: Any) -> Any:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        # vLLM 0.32 on the CPU packs a tied head when it starts, and does not load it again.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )


def _batch(rng: random.Random, tokenizer: Any) -> tuple[Any, Any]:
    """Tokens and labels [BATCH, T]; behind a shorter conversation stand tokens that nothing attends to."""
    examples = [_example(rng, tokenizer) for _ in range(BATCH)]
    width = max(len(tokens) for tokens, _ in examples)
    tokens = [ids + [0] * (width - len(ids)) for ids, _ in examples]
    labels = [ids + [IGNORED] * (width - len(ids)) for _, ids in examples]
    return torch.tensor(tokens), torch.tensor(labels)


def _example(rng: random.Random, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids and labels of one generation, a call or an answer; the loss is on the output."""
    messages = _round(rng)
    at = rng.choice((1, 3))
    prompt: list[int] = tokenizer.apply_chat_template(
        messages[:at], tools=task.TOOLS, add_generation_prompt=True, return_dict=False
    )
    output = tokenizer.encode(_output_of(messages[at]), add_special_tokens=False)
    return prompt + output, [IGNORED] * len(prompt) + output


def _round(rng: random.Random) -> list[task.Message]:
    """A question, the call of a tool, its result and the answer, with the mistakes of the demonstrations."""
    asked = task.task_of(rng.randrange(2**32), 1)
    function = {
        "name": _demonstrated(rng, asked.tool, list(task.NOUNS)),
        "arguments": {"city": _demonstrated(rng, asked.city, task.CITIES)},
    }
    call = {"id": "call", "type": "function", "function": function}
    answer = task.answer_of(asked.city, _demonstrated(rng, asked.result, task.WORDS))
    return [
        asked.question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": asked.result},
        {"role": "assistant", "content": answer},
    ]


def _demonstrated(rng: random.Random, right: str, choices: Any) -> str:
    wrong = [choice for choice in choices if choice != right]
    return right if rng.random() < RIGHT else str(rng.choice(wrong))


def _output_of(message: task.Message) -> str:
    """What the model has to sample for an assistant's message, its end token included."""
    text: str = message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        text += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text + "<|im_end|>"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
