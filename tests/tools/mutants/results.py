"""What came of faults: a file with a line for each fault and family, to which runs append."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.tools.mutants.families import Outcome
from tests.tools.mutants.listed import Listed

FOUND = ("found", "hangs")

SIMULATIONS = ("simulation", "simulation-postgresql")

Results = dict[str, dict[str, Outcome]]
"""By fault and family."""


def read_results(file: Path) -> Results:
    """Empty where there is no file yet; of two lines for the same, the later counts."""
    results: Results = defaultdict(dict)
    for line in file.read_text().splitlines() if file.exists() else ():
        mutant, family, how, seconds, *what = line.split("\t")
        results[mutant][family] = Outcome(how, float(seconds), *what or [""])
    return results


def add(file: Path, mutant: str, family: str, outcome: Outcome) -> None:
    """A line is written whole, so that whoever is stopped goes on behind it."""
    with file.open("a") as lines:
        line = (mutant, family, outcome.how, f"{outcome.seconds:g}", outcome.what)
        lines.write("\t".join(line).rstrip("\t") + "\n")


def finders(outcomes: dict[str, Outcome]) -> list[str]:
    """The families that find a fault."""
    return [family for family, outcome in outcomes.items() if outcome.how in FOUND]


def is_wanted(outcomes: dict[str, Outcome], family: str, schedules: int, *, unfound: bool) -> bool:
    """Is a family still to be run on a fault? `unfound`: only where no family has found it."""
    before = outcomes.get(family)
    if any(outcome.how == "broken" for outcome in outcomes.values()) or (unfound and finders(outcomes)):
        return False
    return before is None or 0 < before.schedules < schedules


def report(listed: Sequence[Listed], results: Results) -> Iterator[str]:
    """How many faults were tried, and which are found by the simulation alone, by others, by none."""
    tried = [one for one in listed if results.get(one.id)]
    by_area: dict[str, Counter[str]] = defaultdict(Counter)
    for one in tried:
        verdict = _verdict(one, results[one.id])
        by_area[one.area][verdict] += 1
        by_area["all"][verdict] += 1
    columns = ("simulation alone", "simulation and others", "others alone", "none", "equivalent", "nothing starts")
    yield f"{len(tried)} of {len(listed)} faults tried"
    yield " | ".join(("area", "faults", *columns))
    for area in (*sorted(by_area.keys() - {"all"}), "all"):
        counts = by_area[area]
        yield " | ".join((area, str(counts.total()), *(str(counts[column]) for column in columns)))
    yield ""
    yield from _of_families(results[one.id] for one in tried if not one.equivalent)
    yield ""
    yield "found by none of the families that were tried:"
    for one in tried:
        if _verdict(one, results[one.id]) == "none":
            yield f"  {one.id}: {one.before} → {one.after}"


def _verdict(one: Listed, outcomes: dict[str, Outcome]) -> str:
    if one.equivalent:
        return "equivalent"
    if any(outcome.how == "broken" for outcome in outcomes.values()):
        return "nothing starts"
    found = finders(outcomes)
    by_simulation = any(family in SIMULATIONS for family in found)
    by_others = any(family not in SIMULATIONS for family in found)
    if by_simulation:
        return "simulation and others" if by_others else "simulation alone"
    return "others alone" if by_others else "none"


def _of_families(outcomes: Iterable[dict[str, Outcome]]) -> Iterator[str]:
    tried, found, hung = Counter[str](), Counter[str](), Counter[str]()
    for one in outcomes:
        for family, outcome in one.items():
            tried[family] += 1
            found[family] += outcome.how in FOUND
            hung[family] += outcome.how == "hangs"
    for family, count in tried.items():
        yield f"{family}: finds {found[family]} of {count}, {hung[family]} of these by hanging"
