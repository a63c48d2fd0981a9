"""The bytes of exports, replies and logs for fixed requests. A wanted change is pinned anew by
`python -m tests.tools.digest --pin`, after a look at what changed: `--before CHECKOUT --save FOLDER`."""

from __future__ import annotations

import pytest

from ops.server import ROOT
from tests.tools.digest.take import PINNED, digests, taken


@pytest.mark.long
def test_fixed_requests_leave_the_bytes_that_are_pinned() -> None:
    pinned = dict(line.split(" ", 1)[::-1] for line in PINNED.read_text().splitlines())
    now = digests(taken(ROOT, short=True))
    assert [name for name in pinned | now if pinned.get(name) != now.get(name)] == []
