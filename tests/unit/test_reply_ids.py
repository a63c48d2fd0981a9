"""A reply says whose it is, where the engine gives the request's `rid` back."""

from __future__ import annotations

import pytest

from app.domain.rids import rid_of
from app.fleet.member import Member
from app.upstream.body import Body

OWN, OTHER = rid_of("s", 2), rid_of("s", 3)


def body(text: str) -> Body:
    return Body([text.encode()])


@pytest.mark.parametrize("reply", ['{"id":"%s","object":1}', '{"object":"chat.completion", "id" : "%s"}'])
def test_a_reply_names_the_request_that_it_answers(reply: str) -> None:
    assert Member("http://a").rid_in(body(reply % OWN)) == OWN
    assert Member("http://a").rid_in(body(reply % OTHER)) == OTHER


@pytest.mark.parametrize("reply", ['{"id":"chatcmpl-1"}', '{"id":"0123456789abcdef0123456789abcdef"}', "{}", ""])
def test_an_id_that_is_none_of_ours_says_nothing(reply: str) -> None:
    assert Member("http://a").rid_in(body(reply)) is None


def test_no_rid_is_another_ones_beginning() -> None:
    assert len({len(rid_of(name, fence)) for name in ("s", "session") for fence in (1, 10**9)}) == 1
