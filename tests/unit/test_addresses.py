"""Patterns of the addresses of a router's workers."""

from __future__ import annotations

import pytest

from app.domain.patterns import address_pattern

URLS = (
    "http://10.0.0.1:30000",
    "https://10.0.0.1:30000/prefix",
    "http://10.0.0.1.evil.example:30000",
    "http://10.0.0.evil:30000",
    "http://[fd00::1]:30000",
    "http://worker:8000",
    "http://w-1.workers.example.org:30000",
    "http://w-1.evil.workers.example.org:30000",
    "http://w-1.workers.example.org.evil.example:30000",
    "http://W-2.workers.example.org",
    "https://w-2.workers.example.org",
    "http://167772161:30000",
)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("10.0.0.0/8", [0, 1]),
        ("10.0.0.1", [0, 1]),
        ("http://10.0.0.1", [0]),
        ("10.0.0.1:30001", []),
        ("[fd00::]/8", [4]),
        ("[fd00::1]:30000", [4]),
        ("worker", [5]),
        ("*.workers.example.org", [6, 9, 10]),
        ("w-*.workers.example.org:30000", [6]),
        ("W-*.workers.example.org:80", [9]),
        ("https://*.workers.example.org:443", [10]),
    ],
)
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
