"""The ids by which engines know generations."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from app.domain.rids import RID_CHARACTERS, RID_MARK, rid_of

SESSIONS = st.text(string.ascii_letters + string.digits + "._:-", min_size=1, max_size=128)
FENCES = st.integers(1, 2**63 - 1)


@given(st.tuples(SESSIONS, FENCES), st.tuples(SESSIONS, FENCES))
def test_no_rid_is_a_prefix_of_another(one: tuple[str, int], other: tuple[str, int]) -> None:
    """SGLang aborts every generation whose rid begins with the one it is given."""
    first, second = rid_of(*one), rid_of(*other)
    assert first.startswith(second) == (one == other)
    assert len(first) == len(second) == len(RID_MARK) + RID_CHARACTERS


def test_neighbours_differ() -> None:
    rids = [rid_of(session, fence) for session in ("s", "s1", "s:1") for fence in range(1, 200)]
    assert len(set(rids)) == len(rids)
    assert not any(a != b and a.startswith(b) for a in rids for b in rids)
