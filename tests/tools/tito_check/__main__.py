"""`python -m tests.tools.tito_check --conversations 1000 --seed 1`: 1 on a mismatch, whose seed it names."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.tito.prompts import Prompts
from tests.tools.tito_check import tokenizers
from tests.tools.tito_check.check import Check, Layout, Mismatch
from tests.tools.tito_check.conversations import Kind

_COUNTS = ("prompts", "others", "equal", "spelling", "reasoning", "cut", "other_stop")
_HEADING = """\
prompts: equal to the engine's to the last id; others: messages that nothing was generated in, all equal;
equal, spelling, reasoning, cut, other_stop: messages with a generation, by how they compare (see check.py)
"""

_CHATML = ("<|im_end|>", "<|im_end|>")
KINDS = {
    "qwen2.5": Kind(True, False, True, False, _CHATML, "<|endoftext|>"),
    "qwen3": Kind(True, True, True, True, _CHATML, "<|endoftext|>"),
    "qwen3-2507": Kind(True, False, True, False, _CHATML, "<|endoftext|>"),
    "qwen3-vl": Kind(True, False, True, False, _CHATML, "<|endoftext|>"),
    "qwen3.5": Kind(True, True, False, True, _CHATML, "<|endoftext|>"),
    "qwen3.5-nothink": Kind(True, True, False, True, _CHATML, "<|endoftext|>"),
    "qwen3.6": Kind(True, True, False, True, _CHATML, "<|endoftext|>"),
    "qwen3.8": Kind(True, True, False, True, _CHATML, "<|endoftext|>"),
    "glm-4.5": Kind(True, True, True, True, ("<|user|>", "<|observation|>"), "<|endoftext|>"),
    **dict.fromkeys(
        ("nemotron-3", "nemotron-3-super", "nemotron-3-ultra", "nemotron-3.5"),
        Kind(True, True, False, True, _CHATML, "<|endoftext|>"),
    ),
    "llama3": Kind(False, False, True, False, ("<|eot_id|>", "<|eot_id|>"), "<|end_of_text|>"),
}
_OPENINGS = {
    "glm-4.5": ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "llama3": ("<|start_header_id|>",),
}
_TAILS = {
    "glm-4.5": "",
    "llama3": "<|eot_id|>",
}
PINNED: dict[str, dict[str, Any]] = {
    **{name: {"preserve_thinking": True} for name in ("qwen3.6", "qwen3.8")},
    **{name: {"truncate_history_thinking": False} for name in KINDS if name.startswith("nemotron")},
}


def check(folder: Path, name: str) -> Check:
    """A check of one family on a tokenizer trained for it; what it expects is written here, not asked of `app.tito`."""
    path = tokenizers.save(folder, name)
    prompts = Prompts.load(str(path), tokenizers.row(name))
    tokenizer = tokenizers.load(path)
    openings = tokenizer.convert_tokens_to_ids(list(_OPENINGS.get(name, ("<|im_start|>",))))
    tail = tokenizer.encode(_TAILS.get(name, "<|im_end|>\n"), add_special_tokens=False)
    kind = KINDS[name]
    stops = () if tail else tokenizer.convert_tokens_to_ids(list(kind.end_tokens))
    return Check(prompts, tokenizer, kind, Layout(frozenset(openings), tail, frozenset(stops)), PINNED.get(name, {}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.tools.tito_check", description=__doc__)
    parser.add_argument("--conversations", type=int, default=1000, help="a family")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    if tokenizers.template("qwen3") is None:
        parser.error("the real chat templates come with the package trl: pip install --no-deps trl")
    print(_HEADING)
    print(f"{'family':<11} conversations  turns", *(f"{count:>10}" for count in _COUNTS), "mismatches       s")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in options.families:
            began = time.monotonic()
            family = check(Path(folder), name)
            mismatch = _first_mismatch(family, name, options)
            failed = failed or mismatch is not None
            counts = " ".join(f"{family.tally[count]:>10}" for count in _COUNTS)
            seconds = f"{time.monotonic() - began:7.1f}"
            size = f"{name:<11} {family.conversations:>13} {family.turns:>6}"
            print(size, counts, f"{int(mismatch is not None):>10}", seconds)
            if mismatch is not None:
                print(mismatch)
    return 1 if failed else 0


def _first_mismatch(family: Check, name: str, options: argparse.Namespace) -> str | None:
    for number in range(options.conversations):
        seed = f"{options.seed}/{name}/{number}"
        try:
            family.conversation(seed)
        except Mismatch as mismatch:
            return f"conversation {seed}: {mismatch}"
    return None


if __name__ == "__main__":
    sys.exit(main())
