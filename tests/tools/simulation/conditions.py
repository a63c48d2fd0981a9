"""What a schedule is about, how bad its days are, and how often its clients do what: drawn from its seed."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

Theme = Literal["fights", "streams", "features"]
"""`fights`: rivals of one session, whose calls must have an order (`orders`). `streams`: engines that stream, staged
tokens, names (`staged`, `named`). `features`: messages spelled anew, limits, feeds, forks, archives. Readers are in
all but `streams`; payloads too, where no rivals fight; the drills at the end are in all."""


def draw_theme(seed: int) -> Theme:
    """Drawn apart from all else in a schedule."""
    drawn: Theme = random.Random(f"theme {seed}").choices(("fights", "streams", "features"), (7, 4, 9))[0]
    return drawn


class Weather(msgspec.Struct):
    """Probabilities of faults and mean delays in seconds, of one schedule.

    `reply_reset`: a reply's connection is reset once the kernel has the reply; `unread`: a request lies at a process
    for a while before it is read. `put_s`: how long an upload to object storage takes besides. `patience_s`: how long
    clients wait for an answer; `keyed`: how many turns have a key; `is_proxied`: a proxy stands before the processes,
    and keeps a connection whose client has given up.
    """

    is_bad: bool = True
    refused: float = 0.0
    conflicts: float = 0.0
    answer_lost: float = 0.0
    full: float = 0.0
    stalls: float = 0.0
    engine_faults: float = 0.0
    reply_lost: float = 0.0
    reply_reset: float = 0.0
    unread: float = 0.0
    is_proxied: bool = False
    workers_fail: float = 0.0
    transaction_s: float = 0.002
    network_s: float = 0.002
    engine_s: float = 0.3
    stall_s: float = 5.0
    put_s: float = 0.0
    patience_s: float = 90.0
    keyed: float = 0.6
    mishap_s: float = 3.0
    down_s: float = 1.0

    def be_brief(self) -> None:
        """Nobody waits for long, and transactions overlap."""
        self.transaction_s = max(self.transaction_s, 0.02)
        self.engine_s = min(self.engine_s, 0.5)
        self.stall_s = min(self.stall_s, 6.0)
        self.down_s = min(self.down_s, 1.0)

    def calm(self) -> None:
        """From now on nothing fails."""
        self.is_bad = False
        self.transaction_s = self.network_s = 0.002
        self.engine_s = 0.3
        self.patience_s = 90.0


def draw_weather(rng: random.Random) -> Weather:
    """Some schedules have none of a fault, some much of it: what happens often hides what needs quiet."""

    def often(most: float) -> float:
        return rng.choice((0.0, most / 4, most))

    is_late = rng.random() < 0.4  # One alone does little: attempts come late where clients do not wait for them.
    return Weather(
        refused=often(0.06),
        conflicts=often(0.06),
        answer_lost=often(0.08),
        full=often(0.02),
        stalls=often(0.04),
        engine_faults=often(0.5),
        reply_lost=often(0.1),
        reply_reset=often(0.1),
        unread=0.4 if is_late else 0.0,
        is_proxied=rng.random() < 0.6,
        patience_s=2.0 if is_late else 90.0,
        keyed=0.1 if is_late else 0.6,
        workers_fail=often(0.05),
        transaction_s=rng.choice((0.0005, 0.005, 0.1)),
        network_s=rng.choice((0.0005, 0.02, 0.5)),
        engine_s=rng.choice((0.05, 0.5, 4.0)),
        stall_s=rng.choice((1.0, 6.0, 20.0)),
        mishap_s=rng.choice((0.4, 2.0, 8.0)),
        down_s=rng.choice((0.1, 1.0, 8.0)),
    )


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
