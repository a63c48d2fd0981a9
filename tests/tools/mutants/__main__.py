"""The command, as the package describes it."""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.tools.mutants import __doc__ as PURPOSE
from tests.tools.mutants.faults import Copy, Fault, Outcome, read_list, run

ROOT = Path(__file__).resolve().parents[3]

Results = dict[str, dict[str, Outcome]]
"""By fault and command."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutants",
        description=PURPOSE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose code is broken")
    parser.add_argument("--into", type=Path, help="the file of the results; what stands in it is not run again")
    parser.add_argument("--unfound", action="store_true", help="run only on what no command has found so far")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="after which a fault counts as found")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are run at once")
    parser.add_argument("--report", type=Path, metavar="FILE", help="a table of the results, and what none has found")
    parser.add_argument("command", nargs="*", help="behind --")
    chosen = parser.parse_args()
    if chosen.report:
        print("\n".join(report(read_list(), read_results(chosen.report))))
    elif chosen.command and chosen.into:
        _run(chosen)
    else:
        parser.error("--into FILE -- COMMAND, or --report FILE")
    return 0


def _run(chosen: argparse.Namespace) -> None:
    listed, results, name = read_list(), read_results(chosen.into), shlex.join(chosen.command)
    wanted = [one for one in listed if not one.equivalent and is_wanted(results[one.id], name, unfound=chosen.unfound)]
    random.Random(name).shuffle(wanted)  # What has been run so far is a sample of all.
    program = shutil.which(chosen.command[0], path=Path(sys.executable).parent) or chosen.command[0]
    command = [program, *chosen.command[1:]]
    copies = SimpleQueue[Copy]()
    for _ in range(chosen.jobs):
        copies.put(Copy(chosen.tree.resolve()))

    def one_run(fault: Fault) -> None:
        copy = copies.get()
        try:
            with copy.broken(fault):
                outcome = run(command, copy, chosen.limit)
        except LookupError as error:
            print(error)
            return
        finally:
            copies.put(copy)
        add(chosen.into, fault.id, name, outcome)
        print(f"{outcome.how} {outcome.seconds:g} s {outcome.what} {fault.id}", flush=True)

    try:
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(one_run, wanted))
    finally:
        while not copies.empty():
            copies.get().close()


def read_results(file: Path) -> Results:
    """A line for each fault and command; of two for the same, the later counts."""
    results: Results = defaultdict(dict)
    for line in file.read_text().splitlines() if file.exists() else ():
        fault, command, how, seconds, *what = line.split("\t")
        results[fault][command] = Outcome(how, float(seconds), *what)
    return results


def add(file: Path, fault: str, command: str, outcome: Outcome) -> None:
    """A line is written whole, so that whoever is stopped goes on behind it."""
    with file.open("a") as lines:
        lines.write("\t".join((fault, command, outcome.how, f"{outcome.seconds:g}", outcome.what)) + "\n")


def is_wanted(outcomes: dict[str, Outcome], command: str, *, unfound: bool) -> bool:
    """Is a command still to be run on a fault? `unfound`: only where no command has found it."""
    is_known = any(one.how == "broken" or (unfound and one.is_found) for one in outcomes.values())
    return command not in outcomes and not is_known


def report(listed: Sequence[Fault], results: Results) -> Iterator[str]:
    """By area and by command how many faults were found, and which by none."""
    tried = [one for one in listed if results.get(one.id)]
    found = [one for one in tried if any(each.is_found or each.how == "broken" for each in results[one.id].values())]
    yield f"{len(found)} of {len(tried)} faults found; {len(listed)} are on the list"
    areas, found_in = Counter(one.area for one in tried), Counter(one.area for one in found)
    yield from (f"{area}: {found_in[area]} of {count}" for area, count in sorted(areas.items()))
    for command in sorted({command for one in tried for command in results[one.id]}):
        outcomes = [results[one.id][command] for one in tried if command in results[one.id]]
        yield f"{command}: finds {sum(one.is_found for one in outcomes)} of {len(outcomes)}"
    yield from (f"found by none: {one.id}" for one in tried if one not in found)


if __name__ == "__main__":
    sys.exit(main())
