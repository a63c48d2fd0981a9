"""Which connections are accepted, by the number of free file descriptors."""

from __future__ import annotations

import resource

import pytest

from app.process import MAX_RESERVE, MIN_RESERVE, ConnectionLimit


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """What the system allows, as the process believes it; what it asks for."""
    state = {"limit": (256, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: state["limit"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: state.update(limit=limit))
    return state


def test_it_takes_what_the_system_allows(limited: dict[str, tuple[int, int]]) -> None:
    ConnectionLimit(Clock()).open()
    assert limited["limit"] == (1024, 1024)
    limited["limit"] = (1024, resource.RLIM_INFINITY)
    ConnectionLimit(Clock()).open()
    assert limited["limit"] == (1 << 20, resource.RLIM_INFINITY)


@pytest.mark.parametrize(("limit", "reserve"), [(64, MIN_RESERVE), (1024, 128), (1 << 16, MAX_RESERVE)])
def test_the_last_descriptors_are_kept(limited: dict[str, tuple[int, int]], limit: int, reserve: int) -> None:
    limited["limit"] = (limit, limit)
    connections = ConnectionLimit(Clock())
    connections.open()
    for descriptor, capacity in (
        (5, "free"),
        (limit - reserve - 1, "free"),
        (limit - reserve, "scarce"),
        (limit - reserve // 2 - 1, "scarce"),
        (limit - reserve // 2, "none"),
        (limit - 1, "none"),
    ):
        assert connections.capacity(descriptor) == capacity, descriptor
