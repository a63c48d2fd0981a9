"""Run the tests in another order: `pytest -p tests.tools.shuffled`, and with SHUFFLE_SEED again in the same one.

Modules come in any order, and the tests within one. Tests of two modules are not mixed: each switch would start the
module's servers again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")


def pytest_report_header() -> str:
    return f"shuffled: SHUFFLE_SEED={seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First: pytest then brings together what shares a fixture's parameter."""
    order = random.Random(seed())
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    items[:] = [item for name in _shuffled(sorted(modules), order) for item in _shuffled(modules[name], order)]


def seed() -> str:
    return os.environ.setdefault("SHUFFLE_SEED", str(random.randrange(10**6)))


def _shuffled(items: Sequence[T], order: random.Random) -> list[T]:
    return order.sample(items, len(items))
