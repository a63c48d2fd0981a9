"""Make an Idefics3 of two layers with random weights: `python -m tests.tools.real_engine.images FOLDER`.

It sees images. It runs in the engine's environment, which has PyTorch. Of the models with images that vLLM serves this
is one that needs no `torchvision`; Qwen2-VL needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests.tools.tito_check import tokenizers

SIDE = 56
"""Pixels, of an image as the model sees it: 4 x 4 patches, of which 2 x 2 become a token."""

_SPECIAL = (
    "<|im_end|>",
    "<|im_start|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)
_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}{{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}{{- part.text if part.type == 'text' else '<image>' -}}{%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def main(folder: Path) -> None:
    torch.manual_seed(1)
    tokenizers.save_with(folder, _TEMPLATE, _SPECIAL)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    layers: dict[str, Any] = {
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "hidden_size": 64,
        "num_attention_heads": 2,
    }
    text = LlamaConfig(
        **layers,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    settings: dict[str, Any] = {
        "text_config": text,
        "vision_config": {**layers, "image_size": SIDE, "patch_size": 14},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "pad_token_id": end,
    }
    Idefics3ForConditionalGeneration(Idefics3Config(**settings)).save_pretrained(folder)
    edge = {"longest_edge": SIDE}
    processor = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(processor, tokenizer, image_seq_len=4, chat_template=_TEMPLATE).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
