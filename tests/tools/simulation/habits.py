"""How often a client does what."""

from __future__ import annotations

import random

import msgspec


class Habits(msgspec.Struct, frozen=True):
    """How often clients do what, beside each other. `loyalty`: how often one stays with the process that it knows."""

    take: float = 10.0
    go_back: float = 1.0
    compact: float = 0.0
    read: float = 1.0
    reward: float = 1.0
    snapshot: float = 0.5
    create: float = 0.5
    reuse: float = 0.3
    close: float = 0.2
    erase: float = 0.2
    twice: float = 0.0
    earlier: float = 0.0
    back: float = 0.0
    other: float = 0.0
    rush: float = 0.0
    loyalty: float = 0.7
    gives_up: float = 0.1


def draw_habits(rng: random.Random, fights: random.Random | None) -> Habits:
    """Some clients do one thing often and another never. `fights` decides how rivals fight; None: they do not."""
    more = [0.0] * 4 if fights is None else [fights.choice((0.0, 0.0, most)) for most in (2.0, 1.0, 1.0, 0.5)]
    return Habits(
        go_back=rng.choice((0.0, 1.0, 5.0)),
        read=rng.choice((0.0, 1.0, 8.0)),
        reward=rng.choice((0.0, 1.0)),
        snapshot=rng.choice((0.0, 0.5, 4.0)),
        create=rng.choice((0.0, 0.5)),
        reuse=rng.choice((0.0, 0.5)),
        close=rng.choice((0.0, 0.2, 1.0)),
        erase=rng.choice((0.0, 0.2, 1.0)),
        twice=more[0],
        earlier=more[1],
        back=more[2],
        other=more[3],
        loyalty=rng.choice((0.0, 0.7, 0.95)),
        gives_up=rng.choice((0.0, 0.1, 0.5)),
    )
