"""How bad a schedule's days are: drawn from its seed, ended by `calm`."""

from __future__ import annotations

import random

import msgspec


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


def draw(rng: random.Random) -> Weather:
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
