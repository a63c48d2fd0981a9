"""How much memory a server and its children hold: exactly at rest, and its peak while they work.

Exactly: the proportional set size (PSS) of `/proc/<pid>/smaps_rollup`, in which shared memory counts once. The
kernel walks all of a process's pages for it, 8 ms for 800 MiB, and holds up the process's own page faults
meanwhile. So the peak comes from the counters in `/proc/<pid>/status`, which cost nothing: anonymous pages, pages
of files, and shared memory, of which a segment that parent and child have mapped counts once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ops.bench import watch
from ops.bench.measure import family

FAMILY_EVERY_S = 0.5
"""How often new children are looked for."""


class Resident(msgspec.Struct):
    """Bytes of a family at one moment, by the kernel's counters."""

    anonymous: int = 0
    files: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.anonymous + self.files + self.shared


class Samples(msgspec.Struct):
    """What the sampler saw: at first, at most and at last."""

    first: Resident
    peak: Resident
    last: Resident
    samples: int
    longest_gap_s: float


class Sampler(watch.Watcher):
    """The process that watches `pid` and all below it."""

    def __init__(self, pid: int, interval_ms: float = 10.0) -> None:
        super().__init__("ops.bench.sampler", "--pid", str(pid), "--interval-ms", str(interval_ms))

    def samples(self) -> Samples:
        """End it and take what it found. Raises WatcherFailed."""
        return msgspec.convert(self.report(), Samples)


def family_pss(pid: int) -> int:
    """Bytes that a process and all below it hold, shared pages counted once."""
    return sum(_kib_fields(one, "smaps_rollup", ("Pss",)).get("Pss", 0) for one in family(pid))


def family_written(pid: int) -> int:
    """Bytes that a process and all below it have sent to the disk, as the kernel charges them."""
    return sum(_fields(one, "io").get("write_bytes", 0) for one in family(pid))


def resident(pids: Sequence[int]) -> Resident:
    """The first of `pids` is the parent: it has mapped the segments of all its children."""
    found = [_kib_fields(pid, "status", ("RssAnon", "RssFile", "RssShmem")) for pid in pids]
    shared = [fields.get("RssShmem", 0) for fields in found]
    return Resident(
        anonymous=sum(fields.get("RssAnon", 0) for fields in found),
        files=sum(fields.get("RssFile", 0) for fields in found),
        shared=max(shared[0], sum(shared[1:])),
    )


def _kib_fields(pid: int, name: str, wanted: Sequence[str]) -> Mapping[str, int]:
    """Some lines of the form `Name:  123 kB` of a file in `/proc/<pid>`, in bytes."""
    return {key: value * 1024 for key, value in _fields(pid, name).items() if key in wanted}


def _fields(pid: int, name: str) -> Mapping[str, int]:
    """Lines that begin `Name: <number>`; none of a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    split = (line.split() for line in text.splitlines())
    return {words[0][:-1]: int(words[1]) for words in split if len(words) > 1 and words[1].isdigit()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.sampler", description=__doc__)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, required=True)
    arguments = parser.parse_args()
    watch.go_first()
    pids = family(arguments.pid)
    first = resident(pids)
    found = Samples(first, first, first, 1, 0.0)
    looked = last = time.perf_counter()
    watch.begin()
    while not watch.told_to_stop(arguments.interval_ms / 1000):
        now = time.perf_counter()
        found.longest_gap_s, last = max(found.longest_gap_s, now - last), now
        if now - looked > FAMILY_EVERY_S:
            pids, looked = family(arguments.pid), now
        found.last = resident(pids)
        found.samples += 1
        if found.last.total > found.peak.total:
            found.peak = found.last
    watch.finish(msgspec.to_builtins(found))


if __name__ == "__main__":
    main()
