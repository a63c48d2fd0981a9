"""The snippets of docs/export.md read what the containers write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shape_rows import TWO_SEGMENTS, TWO_TURNS, experts, rows

import app
from app.export import formats
from app.export.query import ExportQuery
from app.features.page.files import FOLDER

DOCS = Path(app.__file__).parents[1] / "docs" / "export.md"

SNIPPETS = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", DOCS.read_text(), re.DOTALL))


@pytest.mark.parametrize("format", formats.CONTAINERS)
def test_a_snippet_reads_its_format(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [*rows(TWO_TURNS, routing=experts(5)), *rows(TWO_SEGMENTS, session_id="t")]
    writer = formats.open_writer(ExportQuery(format=format, shape="miles"))
    try:
        pieces = [*writer.write([formats.of_row(format, "miles", row) for row in given]), *writer.finish()]
    finally:
        writer.close()
    (tmp_path / f"rows{writer.suffix}").write_bytes(b"".join(pieces))
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(SNIPPETS[format], str(DOCS), "exec"), found)
    assert [list(row["tokens"]) for row in found["rows"]] == [[1, 2, 3, 5, 6], [1, 2, 3], [1, 9, 4]]
    assert [list(row["rollout_log_probs"]) for row in found["rows"]] == [[-0.5, 0.0, -0.125], [-1.0], [-2.0]]
    assert np.array(found["rows"][0]["rollout_routed_experts"]).shape == (4, 2, 3)
    assert [row["status"] for row in found["rows"]] == ["truncated", "completed", "aborted"]


def test_every_shape_and_format_is_in_the_docs_and_every_shape_on_the_page() -> None:
    offered = re.search(r"SHAPES = (\[.*\]);", FOLDER.joinpath("exportform.js").read_text())
    assert offered is not None
    assert set(json.loads(offered[1])) == set(formats.SHAPES)
    text = DOCS.read_text()
    assert [format for format in formats.FORMATS if f"`{format}`" not in text] == []
    assert [shape for shape in formats.SHAPES if f"| `{shape}` |" not in text] == []
