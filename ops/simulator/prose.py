"""Generates text with an exact number of tokens, whose ids are known without encoding.

Every unit begins at a pre-tokenizer boundary. So the joined ids of units are the canonical ids of the joined text, even
if a limit cuts it between units.
"""

from __future__ import annotations

import random

from ops.simulator.tokenizer import SPICE, WORDS, Tokenizer

_BLOCK_TOKENS = 8
_BLOCKS = 512
_SPICE_SHARE = 0.12

Unit = tuple[str, tuple[int, ...]]


class Prose:
    """Draws text from prepared blocks and single-token words."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        rng = random.Random(f"prose {seed}")
        self._openers = self._units(tokenizer, [word.capitalize() for word in WORDS])
        self._words = self._units(tokenizer, [" " + word for word in WORDS])
        self._spice = self._units(tokenizer, list(SPICE), single=False)
        self._blocks = [self._block(rng) for _ in range(_BLOCKS)]

    @staticmethod
    def _units(tokenizer: Tokenizer, texts: list[str], single: bool = True) -> list[Unit]:
        units = [(text, tuple(tokenizer.ids(text))) for text in texts]
        return [unit for unit in units if not single or len(unit[1]) == 1]

    def _block(self, rng: random.Random) -> Unit:
        """A unit of exactly eight tokens that begins and ends with a word."""
        text, ids = rng.choice(self._words)
        while len(ids) < _BLOCK_TOKENS:
            spice = rng.choice(self._spice) if rng.random() < _SPICE_SHARE else None
            word = rng.choice(self._words)
            if spice is not None and len(ids) + len(spice[1]) < _BLOCK_TOKENS:
                text, ids = text + spice[0], ids + spice[1]
            text, ids = text + word[0], ids + word[1]
        return text, ids

    def draw(self, rng: random.Random, count: int, opening: bool = True) -> tuple[str, list[int]]:
        """Text of ``count`` tokens, and their ids. With ``opening`` it begins a text, else it continues one."""
        texts: list[str] = []
        ids: list[int] = []
        if opening and count:
            text, first = rng.choice(self._openers)
            texts.append(text)
            ids.extend(first)
        blocks, rest = divmod(count - len(ids), _BLOCK_TOKENS)
        for text, unit in [*rng.choices(self._blocks, k=blocks), *rng.choices(self._words, k=rest)]:
            texts.append(text)
            ids.extend(unit)
        return "".join(texts), ids
