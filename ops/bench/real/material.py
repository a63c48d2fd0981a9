"""What the real load is made of: token ids, logprobs and texts, made once. Engine and clients cut theirs from the same.

A token is known by its place in an endless row of ids. A *run* is a first place and a count: what a message takes of a
prompt, or what a generation sampled. The tag in a request's newest message says the prompt's runs and those to sample.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

SIZE = 1 << 18
"""After so many places ids and logprobs come again."""

BYTES_A_TOKEN = 4
AGAIN = 7919
"""A generation that is sampled again has the logprobs of the places so much further on."""

Run = tuple[int, int]


def _run(first: str, count: str) -> Run:
    return int(first), int(count)


class Tag(NamedTuple):
    """A turn: its name, the runs of its prompt, the run to sample, and whether the reply calls a tool."""

    name: str
    prompt: Sequence[Run]
    sampled: Run
    calls: bool = False

    def text(self) -> bytes:
        runs = ",".join(f"{first}+{count}" for first, count in (*self.prompt, self.sampled))
        return f"<turn {self.name} {runs} {self.calls:d}> ".encode()

    @classmethod
    def newest_in(cls, body: bytes) -> Self:
        start = body.rindex(b"<turn ") + 6
        name, runs, calls = body[start : body.index(b">", start)].decode().split()
        *prompt, sampled = (_run(*run.split("+")) for run in runs.split(","))
        return cls(name, prompt, sampled, calls == "1")

    def ids(self) -> bytes:
        """The same as the last ids of a prompt of ids, whose name is a number; the engine reads the prompt itself."""
        return b"%d,%d,%d" % (10**9 + self.sampled[0], 1_100_000_000 + self.sampled[1], 1_200_000_000 + int(self.name))

    @classmethod
    def last_ids_in(cls, ids: bytes) -> Self:
        first, count, number = map(int, ids[-40:].split(b",")[-3:])
        return cls(str(number - 1_200_000_000), (), (first - 10**9, count - 1_100_000_000))


TRIPLE = b"[%(logprob)b,%(id)d,null]"
CONTENT = b'{"token":"w%(id)d","logprob":%(logprob)b,"bytes":[119,49,48,48],"top_logprobs":[]}'
LOGPROB = b"%(logprob)b"
"""How a list has a sampled token."""


class Material:
    """`kind` of texts: `code` with prose, or `json`. `spaced`: JSON has a space after each colon and comma."""

    def __init__(self, kind: str = "code", spaced: bool = False) -> None:
        rng = np.random.default_rng(47)
        self.spaced = spaced
        self.comma = b", " if spaced else b","
        self._ids = np.exp(rng.uniform(np.log(100), np.log(150_000), SIZE)).astype(np.int32)
        sure = rng.random(SIZE) < 0.5
        self._logprobs = -(rng.exponential(1.0, SIZE) * np.where(sure, 1e-4, 1.0)).astype(np.float32).astype(np.float64)
        self._texts = _texts(kind)
        self._cuts = [match.end() for match in re.finditer(rb"\\n", self._texts)]
        written = [b"%d" % token + self.comma for token in self._ids.tolist()]
        self._written = memoryview(b"".join(written))
        self._places = [0, *itertools.accumulate(map(len, written))]
        self._entries: dict[bytes, list[bytes]] = {}

    def spelled(self, form: bytes) -> bytes:
        """A form of JSON without texts, as all JSON is written here."""
        return form.replace(b",", b", ").replace(b":", b": ") if self.spaced else form

    def tokens(self, runs: Sequence[Run]) -> NDArray[np.int32]:
        """The ids of runs."""
        return np.concatenate([self._ids.take(range(first, first + count), mode="wrap") for first, count in runs])

    def logprobs(self, run: Run, attempt: int = 1) -> NDArray[np.float64]:
        """The logprobs of a run that was sampled for the so manieth time."""
        first = run[0] + AGAIN * (attempt - 1)
        return self._logprobs.take(range(first, first + run[1]), mode="wrap")

    def ids_text(self, runs: Sequence[Run]) -> list[memoryview]:
        """The ids of runs as JSON without brackets, in pieces."""
        pieces = []
        for first, count in runs:
            while count:
                place = first % SIZE
                taken = min(count, SIZE - place)
                pieces.append(self._written[self._places[place] : self._places[place + taken]])
                first, count = first + taken, count - taken
        return [*pieces[:-1], *(last[: -len(self.comma)] for last in pieces[-1:])]

    def entries(self, form: bytes, run: Run, attempt: int = 1) -> list[bytes]:
        """A list's items for a run that was sampled for the so manieth time."""
        if attempt > 1:
            return self._made(form, self.tokens([run]), self.logprobs(run, attempt))
        if form not in self._entries:
            self._entries[form] = self._made(form, self._ids, self._logprobs)
        made, place = self._entries[form], run[0] % SIZE
        found = made[place : place + run[1]]
        return found + made[: run[1] - len(found)]

    def _made(self, form: bytes, ids: NDArray[np.int32], logprobs: NDArray[np.float64]) -> list[bytes]:
        pairs, form = zip(ids.tolist(), logprobs.tolist(), strict=True), self.spelled(form)
        return [form % {b"id": token, b"logprob": repr(logprob).encode()} for token, logprob in pairs]

    def text(self, run: Run) -> bytes:
        """Whole lines of about the length of a run's tokens, escaped as in a JSON string."""
        size = run[1] * BYTES_A_TOKEN
        start = self._cuts[bisect_left(self._cuts, run[0] * BYTES_A_TOKEN % (self._cuts[-1] - size - 4096))]
        return self._texts[start : self._cuts[bisect_left(self._cuts, start + size)]]

    def said(self, tag: Tag, attempt: int) -> tuple[bytes, bytes]:
        """The content of a reply, and the arguments of its call, escaped; those are empty where it calls nothing."""
        first, count = tag.sampled
        if not tag.calls:
            return b"<try %d> %b" % (attempt, self.text(tag.sampled)), b""
        command = b'{"command":"%b"}' % self.text((first + count // 4, count - count // 4))
        return b"<try %d> %b" % (attempt, self.text((first, count // 4))), escaped(command)


def escaped(text: bytes) -> bytes:
    """JSON as part of a JSON string."""
    return text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def _texts(kind: str) -> bytes:
    """Some megabytes of lines, escaped."""
    if kind == "json":
        rng = np.random.default_rng(48)
        lines = []
        for number, (line, column, size) in enumerate(rng.integers(1, 5000, (24_000, 3)).tolist()):
            found: dict[str, object] = {
                "path": f"src/part_{size % 97}/file_{line}.ts",
                "at": [line, column],
                "sizes": [[size, line], []],
            }
            found |= {"text": f'call(a[{column}], {{"x": [{line}, {size}]}}), "b, c"', "ok": number % 3 == 0}
            lines.append(json.dumps(found))
    else:
        code = sorted([*Path(json.__file__).parent.glob("*.py"), *Path(asyncio.__file__).parent.glob("*.py")])
        lines = [line for path in code for line in path.read_text().splitlines()]
        lines += [line for text in topics.values() for line in text.splitlines()]
    one = json.dumps("\n".join(lines) + "\n", ensure_ascii=False).encode()[1:-1]
    return one * (8_000_000 // len(one) + 1)
