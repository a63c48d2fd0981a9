"""The list of faults that is kept: a sample of all areas and patterns, found again in code that has changed since."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.tools.mutants.edits import Mutant, mutants_of

LIST = Path(__file__).with_name("list.txt")

MUST = re.compile(
    r"app/turn/claims.py:Claims\.\w+:field:|app/store/log_turns.py:\w+\.\w+:field:"
    r"|app/store/statements.py:(_is_held|_heads_since|_written_at):where:"
    r"|app/store/(sqlite|postgres)_turns.py:(TAKE|ADVANCE):text:"
)
"""The odd fields of claims and commits, and the conditions on them in both databases."""

_HELD = re.compile(
    r"^(Known|Claim|Commit|Release|Stage|replace)\(|_at\b|^where\(|^(and_|or_)\(|open_turns\.c\.|^(WHERE|AND) "
)
_PLAIN = re.compile(r"session_id ==? \S*(sid|\?1)\b|\bWHERE (s|o|n)\.session_id = ")
"""Without this condition a statement changes all sessions: every test finds that."""

WEIGHTS = {
    **dict.fromkeys(("where", "write", "text"), 4),
    **dict.fromkeys(("operand", "guard", "field", "values", "swap", "lock"), 3),
    "order": 2,
}
"""How much more often a pattern is drawn than another with as many faults."""


class Listed(NamedTuple):
    """A line of the list. `equivalent` says why the fault changes nothing that anybody could see, if it does not."""

    id: str
    area: str
    before: str
    after: str
    equivalent: str = ""

    @property
    def pattern(self) -> str:
        return self.id.split(":")[2]


def choose(found: Sequence[tuple[str, Mutant]], count: int, seed: int) -> list[Listed]:
    """All that are a must, at least one of each pattern, and then as many of each area until there are `count`."""
    rng = random.Random(seed)
    shuffled = [(area, one) for area, one in found if not _PLAIN.search(one.before)]
    rng.shuffle(shuffled)
    chosen = {one.id: Listed(one.id, area, one.before, one.after) for area, one in shuffled if _is_must(one)}
    pools: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for area, one in shuffled:
        if one.id not in chosen:
            pools[area][one.pattern].append(one)
    for pattern in sorted({one.pattern for _, one in shuffled} - {one.pattern for one in chosen.values()}):
        area = rng.choice(sorted(area for area in pools if pools[area][pattern]))
        one = pools[area][pattern].pop()
        chosen[one.id] = Listed(one.id, area, one.before, one.after)
    taken = Counter[tuple[str, str]]()
    while len(chosen) < count:
        for area in sorted(pools):
            patterns = sorted(pattern for pattern, left in pools[area].items() if left)
            weights = [WEIGHTS.get(pattern, 1) / (1 + taken[area, pattern]) ** 2 for pattern in patterns]
            [pattern] = rng.choices(patterns, weights)
            one = pools[area][pattern].pop()
            taken[area, pattern] += 1
            chosen[one.id] = Listed(one.id, area, one.before, one.after)
    places = {one.id: place for place, (_, one) in enumerate(found)}
    return sorted(chosen.values(), key=lambda one: places[one.id])


def _is_must(one: Mutant) -> bool:
    return MUST.match(one.id) is not None and _HELD.search(one.before) is not None


def read_list(file: Path = LIST) -> list[Listed]:
    """The faults of a list, in its order."""
    return [Listed(*line.split("\t")) for line in file.read_text().splitlines()]


def write_list(listed: Iterable[Listed], file: Path = LIST) -> None:
    """One fault a line, its parts between tabs."""
    file.write_text("".join("\t".join(one).rstrip("\t") + "\n" for one in listed))


def find(listed: Sequence[Listed], tree: Path) -> dict[str, Mutant | None]:
    """The faults of a list in a tree, by their ids in the list: the same change in the same function, or else the only
    one in the same file; None where that is gone."""
    same: dict[tuple[str, ...], list[Mutant]] = defaultdict(list)
    for path in {one.id.split(":")[0] for one in listed}:
        file = tree / path
        for mutant in mutants_of(path, file.read_text()) if file.exists() else ():
            same[path, mutant.pattern, mutant.before, mutant.after].append(mutant)
    found: dict[str, Mutant | None] = {}
    for wanted in listed:
        path, function, pattern, ordinal = wanted.id.split(":")
        fits = same[path, pattern, wanted.before, wanted.after]
        here = [one for one in fits if one.function == function]
        nearest = sorted(here, key=lambda one: abs(one.ordinal - int(ordinal)))
        found[wanted.id] = nearest[0] if nearest else fits[0] if len(fits) == 1 else None
    return found
