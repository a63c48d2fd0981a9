"""What a schedule is about. Not everything is in all of them: what many parts do at once hides what one does, and the
search for an order of a session's calls knows clients alone."""

from __future__ import annotations

import random
from typing import Literal

Theme = Literal["fights", "streams", "features"]
"""`fights`: rivals of one session, whose calls must have an order (`orders`). `streams`: engines that stream, staged
tokens, names (`staged`, `named`). `features`: messages spelled anew, limits, feeds, forks, archives. Readers are in
all but `streams`; payloads too, where no rivals fight; the drills at the end are in all."""


def draw(seed: int) -> Theme:
    """Drawn apart from all else in a schedule."""
    drawn: Theme = random.Random(f"theme {seed}").choices(("fights", "streams", "features"), (7, 4, 9))[0]
    return drawn
