"""Copies of damaged stores: refused unless asked for, and then what is lost is told, in the copy as well."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from pathlib import Path

import pytest
from helpers.databases import run_module
from helpers.pages import How, pages
from integration.stand import error_of, serving

from fault.damaged_pages import (
    WHERE,
    Damaged,
    Whole,
    damaged_list,
    exported,
    others_are_whole,
    six,
    without_cursor,
)
from ops.simulator.process import SimulatorProcess
from ops.verify import Report, verify_url

pytestmark = pytest.mark.long


def command(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module(*arguments, environment={**os.environ, "TURNLOG_DATABASE_URL": f"sqlite+aiosqlite:///{path}"})


def checked(path: Path) -> Report:
    return asyncio.run(verify_url(f"sqlite+aiosqlite:///{path}"))


def hit(whole: Whole, folder: Path, how: How, seed: int = 0) -> Damaged:
    rng = random.Random(f"salvage {how} {seed}")
    return Damaged(whole, folder, [page.number for page in six(whole.path, rng)], how, rng)


def test_verify_goes_on_and_names_sessions_and_tables(whole: Whole, tmp_path: Path) -> None:
    damaged = hit(whole, tmp_path, "zeros")
    report = checked(damaged.path)
    assert report.sessions == len(whole.session_ids)
    assert set(report.unreadable) == damaged.lost_with_replay
    assert {"events", "turns", "blobs", "chunks"} == set(report.damaged_tables)
    done = command(damaged.path, "ops.verify")
    assert done.returncode == 1, done.stderr
    assert "damaged tables: blobs, chunks, events, turns" in done.stdout
    assert all(name in done.stdout for name in damaged.lost_with_replay)


@pytest.mark.parametrize("arguments", [("ops.backup", "copy.db"), ("ops.compact", "--full")])
def test_a_damaged_store_is_not_copied_unasked(whole: Whole, tmp_path: Path, arguments: tuple[str, str]) -> None:
    damaged = hit(whole, tmp_path, "zeros")
    before = damaged.path.read_bytes()
    name, rest = arguments
    done = command(damaged.path, name, rest if rest.startswith("-") else str(tmp_path / rest))
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "tables blobs, chunks, events, turns" in line
    assert any(session_id in line for session_id in damaged.lost)
    assert "--salvage copies the rest" in line
    assert damaged.path.read_bytes() == before
    assert not (tmp_path / "copy.db").exists()
    assert not [one for one in os.listdir(tmp_path) if "partial" in one or "compacting" in one]


def salvaged_is_true(whole: Whole, damaged: Damaged, path: Path) -> None:
    """The copy is sound as a file; each session is in it whole, or says that it is not."""
    for replay, expected, lost in (
        (False, whole.exported, damaged.lost),
        (True, whole.with_replay, damaged.lost_with_replay),
    ):
        # Content that is lost and that nobody looks at is in the way of a damaged page alone.
        before = {row["session_id"] for row in exported(damaged.path, replay=replay) if "excluded" in row}
        assert others_are_whole(expected, exported(path, replay=replay), lost) <= before
    report = checked(path)
    assert (report.unreadable, report.damaged_tables) == ([], [])
    assert not [one for one in report.problems if "the file" in one.what]
    assert {one.session_id for one in report.problems} == damaged.lost_with_replay


@pytest.mark.parametrize("how", ["zeros", pytest.param("random", marks=pytest.mark.long)])
def test_a_salvaged_copy_has_the_others_and_says_what_is_missing(
    whole: Whole, tmp_path: Path, engine: SimulatorProcess, how: How
) -> None:
    damaged = hit(whole, tmp_path, how)
    copy = tmp_path / "copy.db"
    done = command(damaged.path, "ops.backup", str(copy), "--salvage")
    assert done.returncode == 1, done.stderr
    told = {line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("session ")}
    assert told <= damaged.lost_with_replay
    assert told == damaged.lost_with_replay or how == "random", "other bytes in the middle of content are verify's"
    salvaged_is_true(whole, damaged, copy)
    restored = command(damaged.path, "ops.restore", str(copy))
    assert restored.returncode == 0, restored.stderr
    with serving(tmp_path, engine.base_url) as stand:
        left_out = {row["session_id"]: row["excluded"] for row in stand.rows(explain="true") if "excluded" in row}
        assert left_out.keys() <= damaged.lost
        name = next(name for name, why in left_out.items() if "event" in why)
        assert error_of(stand.http.get(f"/sessions/{name}")) == (500, "session_unreadable")
        assert stand.http.post("/sessions", json={"session_id": name}).status_code != 200, "an id is never used again"
        stand.talk(session_id="zz-fresh").say("Hello")


@pytest.mark.parametrize("where", WHERE)
def test_a_damaged_list_costs_a_salvaged_store_nothing(whole: Whole, tmp_path: Path, where: str) -> None:
    """Heads and orders follow from the log."""
    damaged = damaged_list(whole, tmp_path, where, "random", 1)
    before = [without_cursor(row) for row in exported(damaged.path)]
    done = command(damaged.path, "ops.compact", "--full", "--salvage")
    assert done.returncode in (0, 1), done.stderr
    kept = [one for one in os.listdir(tmp_path) if ".damaged-" in one and not one.endswith("-wal")]
    salvaged_is_true(whole, damaged, damaged.path)
    after = [without_cursor(row) for row in exported(damaged.path)]
    assert [row for row in after if "excluded" not in row] == [row for row in before if "excluded" not in row]
    # An index alone is made anew from its table, and nothing is lost.
    assert len(kept) == 1 or (not damaged.lost and done.returncode == 0)


def test_a_sound_store_is_copied_as_ever(whole: Whole, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    assert command(whole.path, "ops.backup", str(copy), "--salvage").returncode == 0
    assert checked(copy).problems == []
    assert len(pages(copy)) == len(pages(whole.path))
