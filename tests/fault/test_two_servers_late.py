"""First attempts that lie unread at a frozen or killed server while their retries are answered at another one."""

from __future__ import annotations

import pytest

from tests.tools import late_attempts

pytestmark = pytest.mark.long


def test_a_late_attempt_undoes_and_doubles_nothing() -> None:
    """But for the ways that docs/concepts.md names, which show that attempts came late indeed."""
    with late_attempts.site() as site:
        results = late_attempts.run(site, 12)
    assert [str(result) for result in results if result.faults] == []
    assert all(result.late for result in results)
    assert sum(result.doubled for result in results if result.way.is_named) > 0
