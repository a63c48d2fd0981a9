"""What the commands that make a page of the documentation from the code have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class GeneratedPage(NamedTuple):
    """The page in `file` and what makes its text."""

    file: Path
    generate: Callable[[], str]

    def is_current(self) -> bool:
        return self.file.is_file() and self.generate() == self.file.read_text()

    def main(self, module: str, about: str | None) -> int:
        """The command line of `python -m <module>`: write the page, or with `--check` exit with 1 if it is outdated."""
        parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
        parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is outdated")
        if parser.parse_args().check:
            return 0 if self.is_current() else 1
        self.file.write_text(self.generate())
        return 0
