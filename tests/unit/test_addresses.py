"""Patterns of the addresses of a router's workers."""

from __future__ import annotations

import pytest
from tables import rows

from app.domain.patterns import address_pattern

URLS = rows("addresses_urls")


@pytest.mark.parametrize(("pattern", "matched"), rows("addresses_patterns"))
def test_a_pattern_matches_no_more_than_it_says(pattern: str, matched: list[int]) -> None:
    found = address_pattern(pattern)
    assert [at for at, url in enumerate(URLS) if found.matches(url)] == matched


REFUSED = (
    *("", "*", "10.0.0.*", "worker.*", "*.*", "10.0.0.0/33", "10.0.0.1/8", "host:0", "host:65536", "host/8"),
    *("ftp://host", "http://host/path", "a b", "a..b", "u@h", "fd00::/8", "[fd00::g]"),
)


@pytest.mark.parametrize("text", REFUSED)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"form|port|label|network|host bits"):
        address_pattern(text)
