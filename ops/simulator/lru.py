"""A bounded cache, used for everything the simulator remembers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A least-recently-used map, bounded by the sum of its entries' weights.

    The simulator's memory must not grow in a long benchmark, since it would be counted as the server's.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._total = 0
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used; ``None`` if absent."""
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int = 1) -> V:
        """Store ``value`` and drop the least recently used entries over the capacity. Returns ``value``.

        An entry heavier than the whole cache is not stored.
        """
        old = self._items.pop(key, None)
        if old is not None:
            self._total -= old[1]
        if weight > self._capacity:
            return value
        self._items[key] = (value, weight)
        self._total += weight
        while self._total > self._capacity:
            _, (_, dropped) = self._items.popitem(last=False)
            self._total -= dropped
        return value

    def clear(self) -> None:
        self._items.clear()
        self._total = 0
