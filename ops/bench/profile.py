"""Samples a process with py-spy and counts its CPU time by innermost frame."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

RATE_HZ = 200
FRAMES = 10


class ProfilerFailed(Exception):
    """py-spy is not installed, or it failed; the message is its output."""


async def top_frames(pid: int, seconds: float, folder: Path) -> list[tuple[str, str]]:
    """The frames with the largest self time, each with its share. Raises ProfilerFailed."""
    command = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if command is None:
        raise ProfilerFailed("py-spy is not installed: pip install py-spy")
    path = folder / "profile.raw"
    options = ["--rate", str(RATE_HZ), "--duration", str(int(seconds)), "--format", "raw", "--output", str(path)]
    process = await asyncio.create_subprocess_exec(
        command,
        "record",
        "--pid",
        str(pid),
        *options,
        "--nonblocking",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise ProfilerFailed(output.decode(errors="replace"))
    return _largest(path.read_text(errors="replace"))


def _largest(raw: str) -> list[tuple[str, str]]:
    leaves: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        leaves[stack.rpartition(";")[2]] += int(count)
    total = max(leaves.total(), 1)
    return [(frame, f"{count / total:.1%}") for frame, count in leaves.most_common(FRAMES)]
