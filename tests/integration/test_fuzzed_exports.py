"""Sessions that hold what a row may not be able to hold: `tests.tools.fuzzed_exports`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.fuzzed_exports import run


@pytest.mark.long
def test_every_export_of_odd_sessions_is_whole(tmp_path: Path) -> None:
    result = run(24, 7, tmp_path)
    assert result.broken == []
    assert min(result.rows, result.excluded, result.damaged, result.refused) > 0
