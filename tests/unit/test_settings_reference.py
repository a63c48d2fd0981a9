"""docs/settings.md says of each setting what the code says."""

from __future__ import annotations

from app.settings import Settings
from ops import settings_reference

PAGE = settings_reference.FILE.read_text()


def test_the_page_is_current() -> None:
    assert settings_reference.filled(PAGE) == PAGE, "run python -m ops.settings_reference"


def test_every_setting_has_a_row() -> None:
    assert sorted(settings_reference.told(PAGE)) == sorted(Settings.model_fields)


def test_what_is_accepted_is_what_the_settings_accept() -> None:
    rows = {line.split(" | ")[0]: line for line in settings_reference.filled(PAGE).splitlines()}
    assert "| `off` | over 0, `off` |" in rows["| `TURNLOG_IDLE_CLOSE_S`"]
    assert "| 1 GiB | from 1 MiB, `off` |" in rows["| `TURNLOG_MAX_REPLAY_BYTES`"]
    assert "| 5 | over 0, at most 3,600 |" in rows["| `TURNLOG_UPSTREAM_CONNECT_TIMEOUT_S`"]
    kinds = "`routed_experts`, `indexer_topk`, `sampling_mask`, several with commas"
    assert f"| none | {kinds} |" in rows["| `TURNLOG_REPLAY`"]
    assert "| CPUs, at most 16 | 1 to 256 |" in rows["| `TURNLOG_WORKERS`"]
