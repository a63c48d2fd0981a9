"""What the code for a fleet costs a turn: the server's CPU with it, beside that of the last commit without it."""

from __future__ import annotations

import argparse

from ops.bench import versions

WITHOUT = "d802e31"
"""The last commit that knew of no fleet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    versions.add_arguments(parser, WITHOUT)


async def main(arguments: argparse.Namespace) -> int:
    return await versions.compare(arguments, "fleet")
