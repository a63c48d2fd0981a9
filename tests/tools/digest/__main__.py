"""The command, as the package describes it."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from ops.server import ROOT
from tests.tools.digest import __doc__ as PURPOSE
from tests.tools.digest.requests import Taken
from tests.tools.digest.take import NORMALISED, PINNED, WAYS, digests, taken

AROUND = 160
"""Bytes that are shown before and behind a difference."""


def main() -> int:
    """Print a digest for each item, or compare with `--before`. Returns 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.digest",
        description=PURPOSE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, help="the folder of another checkout, to compare with")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="engines and set-ups; each takes half a minute"
    )
    parser.add_argument("--all", action="store_true", help="each difference, not only the first")
    parser.add_argument("--save", type=Path, help="a folder for everything that was compared")
    parser.add_argument("--pin", action="store_true", help=f"write the digests that a test compares: {PINNED.name}")
    given = parser.parse_args()
    if given.pin:
        pinned = digests(taken(ROOT, short=True))
        PINNED.write_text("".join(f"{digest} {name}\n" for name, digest in pinned.items()))
        return 0
    for why, pattern, _ in NORMALISED:
        print(f"normalised: {pattern.pattern}: {why}")
    differing = 0
    for way in given.ways:
        after = taken(ROOT, way)
        if given.save is not None:
            _save(given.save / way / "after", after)
        if given.before is None:
            for name, data in after.items():
                print(f"{hashlib.sha256(data).hexdigest()[:16]} {len(data):9} {way} {name}")
            continue
        before = taken(given.before.resolve(), way)
        if given.save is not None:
            _save(given.save / way / "before", before)
        names = [name for name in (before | after) if before.get(name) != after.get(name)]
        differing += len(names)
        print(f"{way}: {len(before)} items, {sum(map(len, before.values()))} bytes; {len(names)} differ")
        for name in names if given.all else names[:1]:
            _show(name, before.get(name, b""), after.get(name, b""))
    return 1 if differing else 0


def _show(name: str, before: bytes, after: bytes) -> None:
    at = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), -1)
    at = min(len(before), len(after)) if at < 0 else at
    print(f"  {name}: {len(before)} and {len(after)} bytes, the first difference at {at}")
    for side, data in (("before", before), ("after", after)):
        print(f"    {side}: {data[max(at - AROUND, 0) : at + AROUND]!r}")


def _save(folder: Path, items: Taken) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in items.items():
        (folder / name.replace("/", "_")).write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
