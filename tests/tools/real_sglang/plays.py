"""What the scripted scheduler samples: a test writes it down, the scheduler reads it by the mark in a prompt's text."""

from __future__ import annotations

import itertools
import re
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = "SGLANG_PLAYS"
"""The environment variable that names the folder of plays; it reaches the processes that SGLang starts."""

_MARK = re.compile(r"\[\[(\d+)\]\]")
_SAMPLED = "sampled.ndjson"


class Play(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation.

    `text`: what is sampled, the end token behind it if it `ends` with `stop`. `hold_at`: after so many tokens it goes
    on once it is released. `waits`: it stays in the waiting queue; only one that begins after the release does not.
    `status` and `message` are those of an abort that the scheduler decides. `experts`: layers and experts a token, of
    routed experts. `cached`: prompt tokens that were in the cache. `step`: tokens of a message, all without it.
    """

    text: str = "ok"
    ends: Literal["stop", "length", "abort"] = "stop"
    hold_at: int | None = None
    waits: bool = False
    status: int | None = None
    message: str = "Aborted"
    experts: tuple[int, int] | None = None
    cached: int = 0
    step: int | None = None


class Sampled(msgspec.Struct, frozen=True):
    """What the scheduler sampled of one request; `experts` has a row a token, of its layers one behind the other."""

    rid: str
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int]]
    experts: list[list[int]] | None


class Plays:
    """The plays in a folder. Each test's marks are its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count(1)

    def mark(self, play: Play) -> str:
        """What a prompt's text has to hold to be answered so."""
        number = next(self._numbers)
        self._file(number, "json").write_bytes(msgspec.json.encode(play))
        return f"[[{number}]]"

    def of(self, text: str) -> tuple[int, Play] | None:
        """The play of the last mark in a prompt's text, and its number."""
        marks = _MARK.findall(text)
        if not marks:
            return None
        number = int(marks[-1])
        return number, msgspec.json.decode(self._file(number, "json").read_bytes(), type=Play)

    def hold(self, number: int) -> bool:
        """Whether the play, which has come to where it holds, has to."""
        self._file(number, "held").touch()
        return not self._file(number, "released").exists()

    def is_held(self, mark: str) -> bool:
        return self._file(int(mark.strip("[]")), "held").exists()

    def release(self, mark: str) -> None:
        self._file(int(mark.strip("[]")), "released").touch()

    def note(self, sampled: Sampled) -> None:
        with (self.folder / _SAMPLED).open("ab") as file:
            file.write(msgspec.json.encode(sampled) + b"\n")

    def sampled(self) -> list[Sampled]:
        """All that has ended, in that order. Parts of a turn that goes on after an abort have one request id."""
        path = self.folder / _SAMPLED
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=Sampled) for line in lines]

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number}.{kind}"


def logprobs_of(before: Sequence[int], ids: Sequence[int]) -> list[float]:
    """The logprobs of sampled ids. Each is made of its id and all ids before it: equal ones prove an equal context."""
    checksum, found = zlib.crc32(array("q", before)), []
    for token in ids:
        checksum = zlib.crc32(array("q", [token]), checksum)
        found.append(-checksum / 2**30)
    return found


def experts_of(position: int, layers: int, top_k: int) -> list[int]:
    """The experts of the token at this position, of one layer behind the other."""
    return [(31 * position + place) % 97 for place in range(layers * top_k)]
