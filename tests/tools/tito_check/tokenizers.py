"""Small tokenizers with a chat template and the special tokens that it writes."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tests.tools.tito_check import templates

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text into words; GLM's and Llama 3's differ only in how many digits stay together."""
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and 12345 other animals look on.\n\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "units": ["C", "F"]}}\n',
    '<tool_response>\n{"temperature": 21.5, "sky": "clear"}\n</tool_response>\nassistant\nuser\nsystem\ntool\n',
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n<tools>\n</tools>\n",
    "Let me think about it. First, I should look at the file; then I can answer: yes or no?\n",
    "the a of to and in is it you that he was for on are with as his they be at one have this from or had by",
]

_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<｜[^｜\s'\"{}]{1,40}｜>|<\|[a-z_\"]{1,20}>|<[a-z_\"]{1,20}\|>|<\|[A-Z_]+_TOKEN\|>"
    r"|\[/?[A-Z_]{3,30}\]|\[gMASK\]|<sop>|</?s>|<bos>|<eos>|<sep>|<pad>|<(?:start|end)_of_[a-z]+>"
    r"|\]~b\]|\]~!b\[|\[e~\[|</?seed:[a-z_]+>|</?(?:assistant|user|system|tool|observation)>"
    r"|<SPECIAL_\d+>|<reserved_\d+>|<用户>|<AI>|<_[a-z]+>"
)
"""How public templates write their tokenizers' special tokens."""

_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
"""GLM's first templates put them together from a message's role."""

_PLAIN = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""Tokens that are never split but are not special."""

_ENDS = ("<|END_OF_TURN_TOKEN|>", "<|end|>\n<|assistant|>")
"""What a template does not show: Command-R and Phi-3 end a generation with the first token of these."""

TEMPLATES = {
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3-2507": "qwen3_instruct_2507",
    "qwen3-vl": "qwen3_vl",
    "qwen3.5": "qwen3_5_think",
    "qwen3.5-nothink": "qwen3_5_nothink",
    "qwen3.6": "qwen3_6",
    "qwen3.8": "qwen3_8",
    "glm-4.5": "glm4moe",
    "llama3": "llama3",
    "gpt-oss": "gptoss",
    "muse": "muse_glimmer",
    "deepseek-v3": "deepseekv3",
    "nemotron-3": "nemotron_3_nano",
    "nemotron-3-super": "nemotron_3_super",
    "nemotron-3-ultra": "nemotron_3_ultra",
    "nemotron-3.5": "nemotron_3_5_lightning",
}
"""Files in the package `trl`, by the names that tests use."""


def template(name: str) -> str | None:
    """A chat template of the installed package `trl` by its file name; None where the package is absent."""
    return dict(templates.trl()).get(f"trl/{name}")


def save(folder: Path, family: str) -> Path:
    """Trains and saves a tokenizer for `family` under `folder`, as `AutoTokenizer` reads one. Returns its folder."""
    source = template(TEMPLATES[family])
    if source is None:
        raise ModuleNotFoundError("trl")
    return save_with(folder / family, source)


def special_tokens(source: str) -> list[str]:
    """The special tokens that a template writes, and those that any tokenizer has."""
    source = source.replace("{}", ":opensource")  # Hy3 puts this into its tokens
    own = [token for token in _SPECIAL.findall(source) if token not in _PLAIN]
    roles = _ROLES if re.search(r"'<\|' ?[+~]|<\|\{\{", source) else ()
    common = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>") if "<｜" in source else ("<s>", "</s>")
    return list(dict.fromkeys([*own, *roles, *common, "<|endoftext|>"]))


def save_with(folder: Path, source: str, special: Sequence[str] | None = None) -> Path:
    """The same for any template; `special` are its special tokens if they are not those that it shows."""
    special = special_tokens(source) if special is None else special
    bpe = tokenizers.Tokenizer.from_str(_trained())
    bpe.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in _PLAIN])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    chatml = "<|im_end|>" if "<|im_end|>" in special else None
    begin, end = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>") if "<｜" in source else ("<s>", "</s>")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": source,
        "eos_token": chatml or (end if end in special else special[0]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        **({"bos_token": begin} if begin in special else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [
        bpe.token_to_id(tokens.partition("\n")[0]) for tokens in _ENDS if all(map(source.__contains__, tokens.split()))
    ]
    if ends:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@functools.cache
def _trained() -> str:
    """A small tokenizer without special tokens, as JSON."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    bpe.train_from_iterator(_CORPUS * 3, trainer)
    return bpe.to_str()


def load(folder: Path) -> Any:
    """The tokenizer as `transformers` reads it."""
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
