"""`python -m tests.tools.tito_check.renderers`: does the package `renderers` render what an engine does?

Prompts of random conversations, rendered by the package and by the chat template itself; 1 if one differs. It needs
`pip install 'renderers[transformers]'` in an environment of its own: the package is no dependency of Turnlog.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.tools.tito_check import tokenizers
from tests.tools.tito_check.__main__ import KINDS, PINNED
from tests.tools.tito_check.conversations import Message, Talk
from tests.tools.tito_check.engine import Engine, dumped

CONFIGS = {
    "qwen3": "Qwen3RendererConfig",
    "qwen3.5": "Qwen35RendererConfig",
    "qwen3.6": "Qwen36RendererConfig",
    "qwen3.8": "Qwen38RendererConfig",
    "glm-4.5": "GLM45RendererConfig",
    "nemotron-3": "Nemotron3RendererConfig",
    "nemotron-3-ultra": "Nemotron3UltraRendererConfig",
    "nemotron-3.5": "Nemotron35RendererConfig",
}
"""The package's class for a family whose template is at hand."""


def conversation(seed: str, family: str) -> tuple[list[Message], Talk]:
    """Messages up to one that an assistant answers."""
    rng = random.Random(seed)
    talk = Talk(rng, KINDS[family])
    messages = talk.opening()
    for _ in range(rng.randint(0, 3)):
        answer = talk.message()
        messages += [answer, *talk.following(answer)]
    return messages, talk


def compare(family: str, tokenizer: Any, count: int) -> Counter[str]:
    """How many prompts are equal, id by id, differ, or are refused by the package."""
    package: Any = importlib.import_module("renderers")
    config = getattr(importlib.import_module("renderers.configs"), CONFIGS[family])
    engine, found = Engine(tokenizer), Counter[str]()
    for number in range(count):
        messages, talk = conversation(f"{family}/{number}", family)
        arguments = {**talk.arguments, **PINNED.get(family, {})}
        expected = engine.ids(messages, talk.tools, arguments)
        renderer = package.create_renderer(tokenizer, config(**arguments))
        tools = [dumped(tool) for tool in talk.tools] if talk.tools else None
        try:
            ids = renderer.render_ids(list(map(engine.shown, messages)), tools=tools, add_generation_prompt=True)
        except ValueError:
            found["refused"] += 1
            continue
        found["equal" if list(ids) == list(expected) else "differ"] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.tools.tito_check.renderers", description=__doc__)
    parser.add_argument("--conversations", type=int, default=200, help="a family")
    count = parser.parse_args().conversations
    print(f"{'family':<17} prompts  equal differ refused")
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for family in CONFIGS:
            found = compare(family, tokenizers.load(tokenizers.save(Path(folder), family)), count)
            differ += found["differ"]
            print(f"{family:<17} {count:>7} {found['equal']:>6} {found['differ']:>6} {found['refused']:>7}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
