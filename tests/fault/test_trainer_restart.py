"""A trainer that is killed and goes on from its checkpoint trains on what it would have trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.databases import Postgres

from tests.tools.trainer_restart import run

pytestmark = pytest.mark.long


def test_with_a_checkpoint_of_its_rollouts_no_sample_differs(tmp_path: Path, postgres: Postgres) -> None:
    whole = run(tmp_path / "whole", 5, None)
    assert all(whole[2:])
    with postgres.database() as url:
        restored = run(tmp_path / "restored", 5, (3, "acknowledged"), database_url=url)
    assert restored == whole
    assert run(tmp_path / "bare", 5, (3, "acknowledged"), restores=False) != whole
