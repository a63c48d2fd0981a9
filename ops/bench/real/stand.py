"""What the benchmarks of the real load share: the engine's process and the sizes of turns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ops.server import PORT, OwnProcess

BASE = 15_000
"""Tokens before the conversation."""

NEW, SAMPLED = 776, 224
"""Tokens of a later turn, as in the sample on the average."""


def engine_process(folder: Path, shape: str, text: str, spaced: bool) -> OwnProcess:
    """The engine, with its log in a folder."""
    return module("engine", folder, "--shape", shape, "--text", text, *(["--spaced"] if spaced else []))


def module(name: str, folder: Path, *options: str) -> OwnProcess:
    """A program beside this file."""
    command = [sys.executable, "-m", f"ops.bench.real.{name}", "--port", PORT, *options]
    return OwnProcess(command, folder / f"{name}.log", environment=dict(os.environ))
