"""Python imports this at its start: the wall clock of a server or an engine stands still, its timers go on."""

from __future__ import annotations

import time

NOW_S = 1_800_000_000.0

time.time = lambda: NOW_S
time.time_ns = lambda: int(NOW_S * 1e9)
