"""The command, as the package describes it."""

from __future__ import annotations

import argparse
import difflib
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.tools.mutants import __doc__ as PURPOSE
from tests.tools.mutants.areas import all_mutants
from tests.tools.mutants.copies import Copy
from tests.tools.mutants.edits import Mutant
from tests.tools.mutants.families import FAMILIES, run
from tests.tools.mutants.listed import LIST, choose, find, read_list, write_list
from tests.tools.mutants.reach import choose as modules_of
from tests.tools.mutants.reach import read_reach, trace
from tests.tools.mutants.results import FOUND, add, is_wanted, read_results, report

ROOT = Path(__file__).resolve().parents[3]

REACH = ROOT / "var/mutants/reach.json"

SOUND_SCHEDULES = 3
"""How many schedules must pass without a fault."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutants",
        description=PURPOSE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose code is broken")
    parser.add_argument("--choose", type=int, metavar="N", help="write the list anew")
    parser.add_argument("--seed", type=int, default=1, help="of the choice")
    parser.add_argument("--show", metavar="ID", help="the fault as a diff")
    parser.add_argument("--run", choices=FAMILIES, metavar="FAMILY", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument(
        "--into", type=Path, help="the file of the results of --run; what stands in it is not run again"
    )
    parser.add_argument("--unfound", action="store_true", help="run only on what no family has found so far")
    parser.add_argument("--schedules", type=int, default=120, help="of the simulation, for each fault")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are run at once")
    parser.add_argument("--trace", choices=FAMILIES, metavar="FAMILY", help="note which functions its modules call")
    parser.add_argument("--reach", type=Path, default=REACH, help="the file of these notes")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="a table of the results in a file, and what none has found"
    )
    chosen = parser.parse_args()
    if chosen.run and chosen.into is None:
        parser.error("--run needs --into, the file of its results")
    tree = chosen.tree.resolve()
    if chosen.choose:
        marks = {one.id: one.equivalent for one in read_list()} if LIST.exists() else {}
        listed = choose(list(all_mutants(tree)), chosen.choose, chosen.seed)
        write_list(one._replace(equivalent=marks.get(one.id, "")) for one in listed)
    elif chosen.show:
        _show(chosen.show, tree)
    elif chosen.trace:
        trace(chosen.trace, FAMILIES[chosen.trace], tree, chosen.reach, schedules=chosen.schedules)
    elif chosen.run:
        _run(chosen, tree)
    elif chosen.report:
        print("\n".join(report(read_list(), read_results(chosen.report))))
    else:
        _count(tree)
    return 0


def _count(tree: Path) -> None:
    found = Counter((area, one.pattern) for area, one in all_mutants(tree))
    patterns = sorted({pattern for _, pattern in found})
    print(" | ".join(("area", "all", *patterns)))
    for area in dict.fromkeys(area for area, _ in found):
        counts = [found[area, pattern] for pattern in patterns]
        print(" | ".join((area, str(sum(counts)), *map(str, counts))))
    print(
        " | ".join(
            ("all", str(found.total()), *(str(sum(found[a, p] for a, p in found if p == one)) for one in patterns))
        )
    )


def _show(wanted: str, tree: Path) -> None:
    one = next((one for _, one in all_mutants(tree) if one.id == wanted), None)
    if one is None:
        sys.exit(f"no pattern makes {wanted} in {tree}")
    source = (tree / one.path).read_text()
    diff = difflib.unified_diff(
        source.splitlines(), one.applied(source).splitlines(), one.path, one.path, lineterm="", n=6
    )
    print("\n".join(diff))


def _run(chosen: argparse.Namespace, tree: Path) -> None:
    listed = read_list(LIST)
    found, results = find(listed, tree), read_results(chosen.into)
    for name in (name for name, mutant in found.items() if mutant is None):
        print(f"no longer there: {name}")
    wanted = [
        (one.id, mutant)
        for one in listed
        if not one.equivalent
        and (mutant := found[one.id]) is not None
        and is_wanted(results[one.id], chosen.run, chosen.schedules, unfound=chosen.unfound)
    ]
    random.Random(chosen.run).shuffle(wanted)  # What has been run so far is a sample of all.
    family, modules = FAMILIES[chosen.run], read_reach(chosen.reach).get(chosen.run)
    if modules is None:
        sys.exit(f"{chosen.run} is not traced yet: --trace '{chosen.run}' --reach FILE")
    copies = SimpleQueue[Copy]()
    for _ in range(chosen.jobs):
        copies.put(Copy(tree))

    def one_run(given: tuple[str, Mutant]) -> None:
        name, mutant = given
        tests = modules_of(mutant, modules, tree)
        first = 1 + results[name][chosen.run].schedules if chosen.run in results[name] else 1
        copy = copies.get()
        try:
            with copy.broken(mutant):
                outcome = run(family, copy, seeds=range(first, 1 + chosen.schedules), modules=tests)
        finally:
            copies.put(copy)
        add(chosen.into, name, chosen.run, outcome)
        print(f"{outcome.how} {outcome.seconds:g} s {outcome.what} {name}", flush=True)

    try:
        copies.put(copy := copies.get())
        sound = run(family, copy, seeds=range(1, 1 + SOUND_SCHEDULES), modules=sorted(modules)[:1])
        if sound.how != "passed":
            sys.exit(f"{chosen.run} does not pass without a fault: {sound}")
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(one_run, wanted))
    finally:
        while not copies.empty():
            copies.get().close()
    number = sum(read_results(chosen.into)[one.id].get(chosen.run, ("",))[0] in FOUND for one in listed)
    print(f"{chosen.run} finds {number} of {len(listed)}")


if __name__ == "__main__":
    sys.exit(main())
