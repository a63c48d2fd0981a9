"""Rollouts beside each other: their steps are matched by what they do, so that one step more shifts nothing.

A step is what a turn did and what came back. The server's page and `turnlog diff` both read rollouts so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from itertools import groupby, takewhile, zip_longest
from typing import NamedTuple

from turnlog.actions import Action, actions_of, calls_of, field, has_failed, json_of, result_line, said_by, text_of

MOST_RESULTS = 4
"""Of a step, the last ones are given in a line each."""

MOST_PAIRS = 20_000_000
"""Where two texts have more pairs of words, their lines are compared; one bit of memory is needed for each pair."""

LEAST_SAME = 0.4
"""A text that has less in common with the other differs as a whole."""

QUOTED = 80
"""Characters of a line that is quoted in words."""

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")

Row = tuple[int | None, int | None]
"""Indexes of two steps beside each other; None is a gap."""


class Step(NamedTuple):
    """What a turn did, and the messages that came before the next one. Steps with equal `did` have the same calls, or
    without calls the same text; those with equal `got` the same messages. Ids of calls, blanks in JSON and the order of
    its keys do not count. `got` is empty where no turn follows."""

    turn: int
    did: str
    tools: tuple[str, ...] = ()
    actions: Sequence[Action] = ()
    got: str = ""
    results: Sequence[str] = ()
    failed: bool = False

    def agrees(self, other: Step) -> bool:
        """They do the same and, as far as something came back, get the same."""
        return self.did == other.did and (self.got == other.got or not self.got or not other.got)


START = Step(turn=0, did="start")
"""The first step of each rollout: it gets the task."""


def add_turn(steps: list[Step], turn: int, messages: Sequence[object], unread: str) -> None:
    """Add a turn of a branch to the steps before it, which begin with START. `messages` are the turn's own, its reply
    last; if they are not there, the step differs from all but those with the same `unread`."""
    given = [message for message in messages[:-1] if field(message, "role") != "assistant"]
    brought = [message for message in given if field(message, "role") != "system"] or given
    if messages:
        steps[-1] = steps[-1]._replace(
            got=_digest(f"{field(message, 'role')} {_spelled(field(message, 'content'))}" for message in given),
            results=[result_line(message) for message in brought[-MOST_RESULTS:]],
            failed=any(map(has_failed, brought)),
        )
    reply = messages[-1] if messages else {"content": unread}
    calls = calls_of(reply)
    did = (f"{call.name} {_spelled(call.arguments)}" for call in calls)
    steps.append(
        Step(
            turn,
            _digest(did) if calls else _digest([next(filter(None, reversed(said_by(reply))), "")]),
            tuple(call.name for call in calls) if messages else (unread,),
            actions_of(messages[-1:]),
        )
    )


def _spelled(given: object) -> str:
    """JSON in one spelling; another text without blanks around it."""
    value = json_of(given) if isinstance(given, str) else given
    try:
        return text_of(given).strip() if value is None else json.dumps(value, sort_keys=True)
    except RecursionError:
        return text_of(given)


def _digest(parts: Iterable[str]) -> str:
    return blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=9).hexdigest()


def align(one: Sequence[Step], other: Sequence[Step]) -> list[Row]:
    """Every step of both once, in order. Beside each other stand steps that do the same, as many as possible, and
    between these such as call the same tools, for other arguments."""
    rows: list[Row] = []
    at, by = 0, 0
    for match in [*_matches([step.did for step in one], [step.did for step in other]), (len(one), len(other))]:
        tools = _matches([step.tools for step in one[at : match[0]]], [step.tools for step in other[by : match[1]]])
        for i, j in [*((at + i, by + j) for i, j in tools), match]:
            rows += [(left, None) for left in range(at, i)]
            rows += [(None, right) for right in range(by, j)]
            rows.append((i, j))
            at, by = i + 1, j + 1
    return rows[:-1]


def table(length: int, alignments: Sequence[Sequence[Row]]) -> list[list[int | None]]:
    """Rows of indexes of several rollouts: in column 0 those of the first, which has so many steps and with which each
    of the others is aligned."""
    beside: list[dict[int, int | None]] = [{} for _ in alignments]
    extra: list[dict[int, list[int | None]]] = [{} for _ in alignments]
    for aligned, near, before in zip(alignments, beside, extra, strict=True):
        place = 0
        for i, j in aligned:
            if i is None:
                before.setdefault(place, []).append(j)
            else:
                near[i] = j
                place = i + 1
    rows: list[list[int | None]] = []
    for place in range(length + 1):
        rows += [[None, *more] for more in zip_longest(*(before.get(place, ()) for before in extra))]
        if place < length:
            rows.append([place, *(near.get(place) for near in beside)])
    return rows


def first_difference(
    one: Sequence[Step], other: Sequence[Step], rows: Sequence[Row], name: str, other_name: str
) -> str | None:
    """Where `other` differs first from `one`, in words; `rows` aligns them. Steps are counted by those of `one`. None:
    nowhere."""
    at = next((at for at, (i, j) in enumerate(rows) if i is None or j is None or not one[i].agrees(other[j])), None)
    if at is None:
        return None
    i, j = rows[at]
    if i is not None and j is not None:
        place = f"Step {i}" if i else "Task"
        if one[i].did != other[j].did:
            return f"{place}: {_where(name, _does(one[i]), other_name, _does(other[j]))}"
        verb = "gets" if i else "is asked"
        return f"{place}: {_where(name, _gets(one[i], verb), other_name, _gets(other[j], verb), 'gets no more')}"
    gaps = list(takewhile(lambda row: None in row, rows[at:]))
    left = _next([i for i, _ in gaps], [i for i, _ in rows[at:]], one)
    right = _next([j for _, j in gaps], [j for _, j in rows[at:]], other)
    before = rows[at - 1][0] or 0
    place = f"Step {before + 1}" if i is not None else f"After step {before}" if before else "At first"
    if left and right:
        return f"{place}: {_where(name, left, other_name, right)}"
    return f"{place}: {name} {left[0]} in addition" if left else f"{place}: {other_name} {right[0]} in addition"


def _next(gaps: Sequence[int | None], rest: Sequence[int | None], steps: Sequence[Step]) -> list[str]:
    """What the steps do where they have no counterpart; nothing if they only go on behind."""
    at = next((at for at in gaps if at is not None), None)
    if at is not None:
        return _does(steps[at])
    return [] if any(at is not None for at in rest) else ["has ended"]


def _does(step: Step) -> list[str]:
    lines = [(action.tool, _cut(action.line)) for action in step.actions]
    return [f"answers “{line}”" if tool is None else f"calls `{line}`" for tool, line in lines] or [
        "does what cannot be read"
    ]


def _gets(step: Step, verb: str) -> list[str]:
    return [f"{verb} “{_cut(line)}”" for line in step.results] or [f"{verb} nothing"]


def _cut(line: str) -> str:
    return line if len(line) <= QUOTED else f"{line[:QUOTED]} …"


def _where(name: str, one: Sequence[str], other_name: str, other: Sequence[str], end: str = "calls no more") -> str:
    """The first of these that differ; lines may be equal where what they are the beginning of is not."""
    for left, right in zip_longest(one, other, fillvalue=end):
        if left != right:
            return f"{other_name} {right} where {name} {left}"
    return f"{other_name} {other[-1]}, like {name}, but continues differently"


def changed(text: str, other: str) -> list[tuple[bool, str]]:
    """The text in parts, and of each whether the other lacks it: by words, or of long texts by lines."""
    words, lacking = _WORDS.findall(text), _WORDS.findall(other)
    if len(words) * len(lacking) > MOST_PAIRS:
        words, lacking = text.splitlines(keepends=True), other.splitlines(keepends=True)
    same = {j for _, j in _matches(lacking, words)}
    shared = sum(len(words[at]) for at in same)
    if shared < LEAST_SAME * max(len(text), len(other)):
        return [(False, text)][: len(text)]
    parts = groupby(range(len(words)), key=lambda at: at not in same)
    return [(is_new, "".join(words[at] for at in part)) for is_new, part in parts]


def _matches(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The pairs of indexes of a longest common subsequence, in order. Common ends are cut off first.

    With the bit-vectors of Hyyrö ("Bit-parallel LCS-length computation revisited", 2004): bit j of row i is 0 where the
    longest common subsequence of one[: i + 1] and other[: j + 1] is longer than that of one[: i + 1] and other[:j]. A
    row is an integer, so 2,000 steps by 2,000 take 8 ms. Beyond MOST_PAIRS only the ends are matched.
    """
    if len(other) > len(one):  # a long row costs its square
        return [(i, j) for j, i in _matches(other, one)]
    most = min(len(one), len(other))
    head = next((at for at in range(most) if one[at] != other[at]), most)
    tail = next((at for at in range(most - head) if one[-1 - at] != other[-1 - at]), most - head)
    left, right = one[head : len(one) - tail], other[head : len(other) - tail]
    middle: list[tuple[int, int]] = []
    if len(left) * len(right) <= MOST_PAIRS:
        places: dict[Hashable, int] = {}
        for j, item in enumerate(right):
            places[item] = places.get(item, 0) | 1 << j
        row = full = (1 << len(right)) - 1
        rows = []
        for item in left:
            both = row & places.get(item, 0)
            row = (row + both | row - both) & full
            rows.append(row)
        i, j = len(left), len(right)
        while i and j:
            if left[i - 1] == right[j - 1]:
                i, j = i - 1, j - 1
                middle.append((head + i, head + j))
            elif rows[i - 1] >> (j - 1) & 1:
                j -= 1
            else:
                i -= 1
    ends = zip(range(len(one) - tail, len(one)), range(len(other) - tail, len(other)), strict=True)
    return [*((at, at) for at in range(head)), *reversed(middle), *ends]
