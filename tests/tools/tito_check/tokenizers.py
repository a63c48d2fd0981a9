"""Small tokenizers with a family's special tokens and its real chat template, which the package `trl` carries.

The templates are read from the installed package and not kept here. A tokenizer takes half a second to train.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

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

_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_GLM_SPECIAL = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
_GLM_PLAIN = (*_QWEN_PLAIN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)

_NEMOTRON_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

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
    "nemotron-3": "nemotron_3_nano",
    "nemotron-3-super": "nemotron_3_super",
    "nemotron-3-ultra": "nemotron_3_ultra",
    "nemotron-3.5": "nemotron_3_5_lightning",
}
"""Files in the package. Most are named as the row of the table that they are of; the others:"""

_ROWS = {
    "qwen3-vl": "qwen3",
    "qwen3.5-nothink": "qwen3.5",
    "llama3": "auto",
    **dict.fromkeys(("nemotron-3-super", "nemotron-3-ultra", "nemotron-3.5"), "nemotron-3"),
}


def row(name: str) -> str:
    """What TURNLOG_TITO_FAMILY is for a key of `TEMPLATES`."""
    return _ROWS.get(name, name)


def template(name: str) -> str | None:
    """A chat template of the installed package `trl` by its file name; None where the package is absent."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return None
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


def save(folder: Path, family: str) -> Path:
    """Trains and saves a tokenizer for `family` under `folder`, as `AutoTokenizer` reads one. Returns its folder."""
    source = template(TEMPLATES[family])
    if source is None:
        raise ModuleNotFoundError("trl")
    if family.startswith("glm"):
        return save_with(folder / family, source, _GLM_SPECIAL, _GLM_PLAIN)
    if family == "llama3":
        return save_with(folder / family, source, _LLAMA_SPECIAL, (), bos="<|begin_of_text|>")
    if family.startswith("nemotron"):
        return save_with(folder / family, source, _NEMOTRON_SPECIAL, _QWEN_PLAIN)
    return save_with(folder / family, source, _QWEN_SPECIAL, _QWEN_PLAIN)


def save_with(
    folder: Path, source: str, special: tuple[str, ...], plain: tuple[str, ...], bos: str | None = None
) -> Path:
    """The same for any template and tokens; `plain` ones are never split but are not special (as `<think>`)."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    bpe.train_from_iterator([*_CORPUS, source] * 3, trainer)
    bpe.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": source,
        "eos_token": special[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        **({"bos_token": bos} if bos else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Any:
    """The tokenizer as `transformers` reads it."""
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
