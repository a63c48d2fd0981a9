"""Golden files, in `golden`: tables of what goes in and what must come out, and a row of each exported shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def rows(name: str) -> list[Any]:
    """The cases of `golden/NAME.ndjson`, each the JSON of its line."""
    return [json.loads(line) for line in (FOLDER / f"{name}.ndjson").read_text(encoding="utf-8").split("\n") if line]


def shape(name: str) -> dict[str, Any]:
    """The row of `golden/shapes/NAME.json`: a field a line."""
    found: dict[str, Any] = json.loads((FOLDER / "shapes" / f"{name}.json").read_text(encoding="utf-8"))
    return found
