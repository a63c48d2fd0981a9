"""The sync client is made from the async one."""

from __future__ import annotations

from ops import unasync


def test_the_sync_client_is_current() -> None:
    assert unasync.is_current(), "run python -m ops.unasync"
