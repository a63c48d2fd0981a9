"""Generated sessions for the search's benchmark, and what is asked of them: the same for the same numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from app.sessions.session_filter import SessionConditions
from app.store.search.reading import EntryFilter
from ops.bench.stored import StoredSession, StoredTurn
from workers.codec import Facts, Wire

WORDS = 30_000
"""Words of the vocabulary; the n-th is 1 / n as frequent as the first, as in a language."""

POOL = 20_000
"""Different turns of which the sessions are composed."""

TOOLS = ("bash", "read", "write", "browse")
ENVIRONMENTS = ("math", "code", "web", "games")

GROUP = 8
"""Sessions of a group."""

ODD = 100
"""The oldest sessions, which end with a call of a tool and a finish reason that no other has."""


class Asked(NamedTuple):
    """A search: its text, the conditions on messages and on their sessions."""

    q: str | None
    entries: EntryFilter = EntryFilter()
    sessions: SessionConditions = SessionConditions()


class Texts:
    """`words` are those of a message."""

    def __init__(self, words: int) -> None:
        self._chance = random.Random(1)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self._chance.choices(letters, k=self._chance.randint(3, 10))) for _ in range(WORDS)]
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, WORDS + 1)))
        self._length = words

    def queries(self) -> dict[str, Asked]:
        """By name. Those after the first ten look for few messages among many, or for old ones."""
        often, some, seldom = self._words[0], self._words[300], self._words[-1]
        return {
            "the most frequent word": Asked(often),
            "a word of every 80th message": Asked(some),
            "a rare word": Asked(seldom),
            "a word of one session": Asked("session7x"),
            "a word that is nowhere": Asked("nowhereatall"),
            "two words": Asked(f"{some} {self._words[200]}"),
            "a phrase": Asked(f'"{often} {self._words[1]}"'),
            "one of two, without a third": Asked(f"{some} OR {seldom} -{self._words[3]}"),
            "a word in tool results": Asked(some, EntryFilter(role="tool")),
            "calls of a tool": Asked(None, EntryFilter(tool="browse", role="assistant")),
            "a phrase of two frequent words, seldom so": Asked(f'"{self._words[4]} {self._words[7]} {self._words[5]}"'),
            "a frequent word in an old group": Asked(often, sessions=SessionConditions(group_id="task-7")),
            "a frequent word, metadata of eight old sessions": Asked(often, EntryFilter(pair="task=7")),
            "metadata of eight old sessions": Asked(None, EntryFilter(pair="task=7")),
            "metadata of every fourth session": Asked(None, EntryFilter(pair="env.name=web")),
            "a finish reason of old replies": Asked(None, EntryFilter(finish_reason="content_filter")),
            "a tool that old replies call": Asked(None, EntryFilter(tool="deploy")),
            "a frequent word in calls of that tool": Asked(often, EntryFilter(tool="deploy")),
            "a reason that no turn has": Asked(None, EntryFilter(reason="superseded")),
            "one old session": Asked(None, EntryFilter(session_id="filled-17")),
        }

    def sessions(self, count: int, turns: int) -> Iterator[StoredSession]:
        """Each begins with a turn that names it; the others come from the pool."""
        pool = [self._turn(number) for number in range(min(POOL, count * turns))]
        odd = self._turn(0, tool="deploy", finish_reason="content_filter")
        for number in range(count):
            first = self._turn(number, f"session{number}x ")
            others = self._chance.choices(pool, k=turns - 1)
            if number < ODD:
                others[-1] = odd
            task = number // GROUP
            metadata = {"env": {"name": ENVIRONMENTS[number % len(ENVIRONMENTS)]}, "task": task, "seed": number}
            yield StoredSession(f"filled-{number}", [first, *others], f"task-{task}", msgspec.json.encode(metadata))

    def _turn(self, number: int, name: str = "", tool: str = "", finish_reason: str = "stop") -> StoredTurn:
        tool = tool or TOOLS[number % len(TOOLS)]
        question = {"role": "user", "content": name + self._said()}
        if not name:
            question = {"role": "tool", "name": tool, "tool_call_id": "c", "content": self._said()}
        call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": '{"path": "a.py"}'}}
        answer = msgspec.json.encode({"role": "assistant", "content": self._said(), "tool_calls": [call]})
        reply = b'{"choices":[{"message":' + answer + b"}]}"
        facts = Facts(bytes(4 * 100), bytes(4 * 60), bytes(8 * 60))
        return StoredTurn.of(facts, Wire([msgspec.json.encode(question)], answer, reply, []), finish_reason)

    def _said(self) -> str:
        return " ".join(self._chance.choices(self._words, cum_weights=self._weights, k=self._length))
