"""Measuring and printing: CPU and memory from /proc, rounds, percentiles and ratios, tables."""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.server import ROOT

RESULTS = ROOT / "var" / "bench"
MIB = 1 << 20
SAMPLE_S = 0.1

Figures = dict[str, Any]


def cpu_s(pid: int) -> float:
    """User and system CPU seconds of a process with all its threads, and of its living children."""
    return sum(_own_cpu_s(one) for one in family(pid))


def family(pid: int) -> list[int]:
    """The ids of a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat(int(entry))):
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _own_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, to the microsecond. Linux derives the id of the CPU clock from the
    process id."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0  # the process has ended


def cpu_s_by_thread(pid: int) -> dict[str, float]:
    """CPU seconds of a process's main thread, of the thread that has written most, of its other threads, and of its
    descendants."""
    own = {thread: _thread_cpu_s(thread) for thread in Path(f"/proc/{pid}/task").iterdir()}
    main = own.pop(Path(f"/proc/{pid}/task/{pid}"))
    writer = max(own, key=lambda thread: _counted(thread, "wchar"), default=None)
    written = 0.0 if writer is None else own.pop(writer)
    return {
        "main": main,
        "writer": written,
        "others": sum(own.values()),
        "workers": sum(map(_own_cpu_s, family(pid)[1:])),
    }


def _thread_cpu_s(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[0]) / 1e9


def disk_bytes(folder: Path) -> float:
    """What everybody has written to a folder's disk; NaN if the system does not count for it."""
    # Linux's figure of a process counts 2 MiB for a page of a file that has such pages in memory.
    os.sync()
    device = folder.stat().st_dev
    try:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except FileNotFoundError:
        return math.nan
    return int(fields[6]) * 512


def _counted(process: Path, name: str) -> int:
    lines = (process / "io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants; pages that they share count once for each sharer's part."""
    return sum(map(_own_resident_bytes, family(pid)))


def _own_resident_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


class Peak(threading.Thread):
    """Samples the memory of a process and its children meanwhile, and keeps the maximum."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._stopped = threading.Event()
        self.before = self.most = resident_bytes(pid)

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            self.most = max(self.most, resident_bytes(self._pid))

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self.join()


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; NaN if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


async def alternate(
    names: Collection[str], rounds: int, measure: Callable[[str], Awaitable[Figures | None]]
) -> dict[str, list[Figures]]:
    """Measure everything of these names in each round, in an order that alternates: a slowdown of the machine affects
    all of them. What `measure` has no figures of is left out."""
    periods: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        for name in sorted(names, reverse=number % 2 == 1):
            if (figures := await measure(name)) is not None:
                periods[name].append(figures)
    return periods


def medians(periods: Sequence[Figures]) -> Figures:
    """Of each figure of a side; of figures that are no numbers nothing."""
    return {
        name: statistics.median(one[name] for one in periods)
        for name, value in periods[0].items()
        if isinstance(value, int | float)
    }


def against(who: str, what: str, ours: Sequence[Figures], theirs: Sequence[Figures]) -> Figures:
    """The median of the ratios of a figure, each of the two sides' periods of one round, and their quartiles."""
    ratios = [one[what] / other[what] for one, other in zip(ours, theirs, strict=True)]
    quartiles = f"{percentile(ratios, 25):.3f}-{percentile(ratios, 75):.3f}"
    return {f"/ {who}": statistics.median(ratios), f"quartiles, {who}": quartiles}


def report(name: str, figures: Mapping[str, Any]) -> None:
    """Print the figures, one on each line, and save them as JSON."""
    width = max(map(len, figures))
    for key, value in figures.items():
        print(f"{key:<{width}}  {_shown(value)}")
    save_figures(name, figures)


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows that have the same columns as a table."""
    names = list(rows[0])
    cells = [names, *([_shown(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def save_figures(name: str, figures: Any) -> None:
    """Save the figures of a run as JSON in RESULTS."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"written to {path}", flush=True)


def print_results() -> None:
    """Print all saved figures as one Markdown table."""
    print("| benchmark | figure | value |\n| --- | --- | --- |")
    for path in sorted(RESULTS.glob("*.json")):
        for name, value in _flat(json.loads(path.read_text())):
            print(f"| {path.stem} | {name} | {_shown(value)} |")


def _flat(figures: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The figures of nested objects, and of rows, which are named by their texts."""
    if isinstance(figures, dict):
        for name, value in figures.items():
            yield from _flat(value, f"{before}{name} ")
    elif isinstance(figures, list) and all(isinstance(row, dict) for row in figures):
        for row in figures:
            texts = " ".join(value for value in row.values() if isinstance(value, str))
            yield from _flat({name: x for name, x in row.items() if not isinstance(x, str)}, f"{before}{texts}: ")
    else:
        yield before.strip(), figures


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
