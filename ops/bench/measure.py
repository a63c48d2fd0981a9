"""What is measured and how it is shown: CPU from /proc, percentiles, the disk's own sync, tables."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def cpu_s(pid: int) -> float:
    """User and system seconds that a process, all of its threads and its living children have used."""
    return sum(_own_cpu_s(one) for one in family(pid))


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat(int(entry))):
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def stat(pid: int) -> list[str]:
    """The fields behind the process's name, or none where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _own_cpu_s(pid: int) -> float:
    """What all threads of a process have used, to the microsecond: its CPU clock, by the number that Linux gives it."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0  # it has ended


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


def sync_once_s(descriptor: int, size: int = 4096) -> float:
    """Seconds that an append of `size` bytes and its fdatasync take."""
    block = os.urandom(size)
    began = time.perf_counter()
    os.write(descriptor, block)
    os.fdatasync(descriptor)
    return time.perf_counter() - began


def report(name: str, figures: Mapping[str, Any]) -> None:
    """Print the figures, one a line, and keep them as JSON."""
    width = max(map(len, figures))
    for key, value in figures.items():
        print(f"{key:<{width}}  {_shown(value)}")
    keep(name, figures)


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows that have the same columns."""
    names = list(rows[0])
    cells = [names, *([_shown(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def keep(name: str, figures: Any) -> None:
    """Write a run's figures beside the others."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"written to {path}", flush=True)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
