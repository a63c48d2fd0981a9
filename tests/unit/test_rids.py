"""The ids by which engines know generations, and which of them a reply names."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.session import RID_CHARACTERS, RID_MARK, rid_of
from app.fleet.member import Member
from app.upstream.body import Body

SESSIONS = st.text(string.ascii_letters + string.digits + "._:-", min_size=1, max_size=128)
NUMBERS = st.integers(1, 2**63 - 1)


@given(st.tuples(SESSIONS, NUMBERS, NUMBERS), st.tuples(SESSIONS, NUMBERS, NUMBERS))
def test_no_rid_is_a_prefix_of_another(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    """SGLang aborts every generation whose rid begins with the one it is given."""
    first, second = rid_of(*one), rid_of(*other)
    assert first.startswith(second) == (one == other)
    assert len(first) == len(second) == len(RID_MARK) + RID_CHARACTERS


OWN, OTHER = rid_of("s", 2, 1), rid_of("s", 3, 1)


def body(text: str) -> Body:
    return Body([text.encode()])


@pytest.mark.parametrize("reply", ['{"id":"%s","object":1}', '{"object":"chat.completion", "id" : "%s"}'])
def test_a_reply_names_the_request_that_it_answers(reply: str) -> None:
    assert Member("http://a").rid_in(body(reply % OWN)) == OWN
    assert Member("http://a").rid_in(body(reply % OTHER)) == OTHER


@pytest.mark.parametrize("reply", ['{"id":"chatcmpl-1"}', '{"id":"0123456789abcdef0123456789abcdef"}', "{}", ""])
def test_an_id_that_is_none_of_ours_says_nothing(reply: str) -> None:
    assert Member("http://a").rid_in(body(reply)) is None
