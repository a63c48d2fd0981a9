"""A small byte-level BPE tokenizer, trained at start-up on generated text.

Every simulator trains the same vocabulary, whatever its seed. So the token ids of several engines of a fleet agree, and
nothing has to be downloaded.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Bpe

K = TypeVar("K")
V = TypeVar("V")

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIALS = (
    *(IM_START, IM_END, "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
VISION_START, IMAGE_PAD, VISION_END = IMAGE_SPECIALS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""Qwen's; their ids come after all others."""

_WORD_LIST = """
about above after again agent all also always and answer any array ask at back base be before began below
best between big book both branch bring build but by call can case change check city clean clear close
code cold column come common compare could count cover day deep describe detail did differ do done down
draw each early east edge else empty end error even every exact example expect fact far fast few field
file find first fit follow for form found free from full function gave get give go good great green group
grow had half hand has have he head help her here high him his hold home hour how idea if in index inside
into is it item its just keep key kind know large last later learn leave left less let level light like
line list little live long look lost low made main make many map mark match may mean measure memory might
more most move much must name near need never new next night no node north not note nothing now number of
off often old on once one only open or order other our out over own page pair part pass path place plain
plan play point present press previous print problem put question quick quiet range read ready really
reason record red remain remember repeat reply request rest result return right river road room root round
row rule run same saw say search second see seem send sequence session set seven several shape short
should show side simple since six size slow small so some sort sound south space stand start state step
still stop store story string strong such sum sun sure table take tell ten test text than that the their
them then there these they thing think this those though three through time to token told tool top total
toward tree true try turn two type under unit until up upon use value very view wait walk want warm was
watch water way we weight well went were west what when where which while white who whole why will wind
with without word work world would write year yes yet you young your zero
"""
WORDS = tuple(_WORD_LIST.split())
SPICE = (
    *(" Zürich", " naïve", " 東京", " 🚀", " 42", " 3", " (", ".", ",", ";"),
    *(" мир", " Ωmega", " x_1", " é", " 👩\u200d🔬"),
)
_CORPUS_SEED = 20_240_607
_VOCABULARY = 2048


def _corpus() -> list[str]:
    """Training text: prose, JSON and some Unicode, as in chats with tools."""
    rng = random.Random(_CORPUS_SEED)
    lines = [" " + word for word in WORDS for _ in range(12)]
    lines += [word.capitalize() for word in WORDS for _ in range(4)]
    for number in range(700):
        words = rng.choices(WORDS, k=12)
        lines.append(" ".join(words).capitalize() + ".")
        values = f'{number}, "{words[1]}": "{words[2]} {words[3]}"'
        arguments = f'{{"{words[0]}": {values}, "{words[4]}": [true, null]}}'
        lines.append(f'{{"name": "{words[5]}_{words[6]}", "arguments": {arguments}}}')
    lines += [
        '{"type": "function", "function": {"name": "", "description": "", "parameters": {"type": "object", '
        '"properties": {"": {"type": "string"}, "": {"type": "integer"}}, "required": [""]}}}\n\n'
    ] * 40
    lines += ["system\nuser\nassistant\n"] * 40
    return lines


@functools.cache
def _train() -> Bpe:
    """Trained once a process: several simulators in one share it."""
    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
    )
    bpe.train_from_iterator(_corpus(), trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in IMAGE_SPECIALS])
    return bpe


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Inverse of the byte-to-character table of byte-level BPE (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    table.update({chr(256 + index): value for index, value in enumerate(others)})
    return table


class Lru(Generic[K, V]):
    """A least-recently-used map, bounded by the sum of its entries' weights.

    The simulator's memory must not grow in a long benchmark, since it would be counted as the server's.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._total = 0
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used; ``None`` if absent."""
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int = 1) -> V:
        """Store ``value`` and drop the least recently used entries over the capacity. Returns ``value``.

        An entry heavier than the whole cache is not stored.
        """
        old = self._items.pop(key, None)
        if old is not None:
            self._total -= old[1]
        if weight > self._capacity:
            return value
        self._items[key] = (value, weight)
        self._total += weight
        while self._total > self._capacity:
            _, (_, dropped) = self._items.popitem(last=False)
            self._total -= dropped
        return value

    def clear(self) -> None:
        self._items.clear()
        self._total = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids in the two forms used in replies and comparisons.

    ``json`` is ``b"1,2,3"`` without brackets, ``packed`` is native int32.
    """

    json: bytes
    packed: bytes
    count: int

    @staticmethod
    def of(ids: list[int]) -> Encoded:
        return Encoded(",".join(map(str, ids)).encode(), array("i", ids).tobytes(), len(ids))

    @staticmethod
    def joined(parts: list[Encoded]) -> Encoded:
        return Encoded(
            b",".join([part.json for part in parts]),
            b"".join([part.packed for part in parts]),
            sum([part.count for part in parts]),
        )

    def ids(self) -> list[int]:
        return list(array("i", self.packed))

    @property
    def raw(self) -> msgspec.Raw:
        """The ids as a part of JSON."""
        return msgspec.Raw(b"[%b]" % self.json)


class Tokenizer:
    """Encodes and decodes text, and has the wire form of each token."""

    def __init__(self) -> None:
        self.bpe = _train()
        byte_of = _byte_of_char()
        vocabulary = self.bpe.get_vocab()
        names = sorted(vocabulary, key=vocabulary.__getitem__)
        self.special_ids = {name: vocabulary[name] for name in (*SPECIALS, *IMAGE_SPECIALS)}
        self.token_bytes = [
            name.encode() if name in self.special_ids else bytes(byte_of[char] for char in name) for name in names
        ]
        self.texts = [value.decode("utf-8", "replace") for value in self.token_bytes]
        self.json_texts = [msgspec.json.encode(text) for text in self.texts]
        self._cache: Lru[str, Encoded] = Lru(96 * 2**20)

    def ids(self, text: str) -> list[int]:
        """The canonical ids of ``text``, with special tokens recognised."""
        found: list[int] = self.bpe.encode(text, add_special_tokens=False).ids
        return found

    def encode(self, text: str) -> Encoded:
        """``ids`` in wire form, cached."""
        found = self._cache.get(text)
        return found if found is not None else self.remember(text, self.ids(text))

    def remember(self, text: str, ids: list[int]) -> Encoded:
        """Cache ids that are known to be canonical, which saves the encoding."""
        return self._cache.put(text, Encoded.of(ids), 200 + 2 * len(text) + 10 * len(ids))

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``. Incomplete UTF-8 at a cut becomes U+FFFD, as in engines."""
        table = self.token_bytes
        size = len(table)
        return b"".join([table[number] for number in ids if number < size]).decode("utf-8", "replace")
