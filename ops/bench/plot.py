"""The load curve as a picture: one panel a size of reply, latency against clients, both on logarithmic scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

LINES = (("p50 ms", "#1b6ca8", "o"), ("p95 ms", "#d9822b", "s"), ("p99 ms", "#b3312c", "^"))
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG from rows with `size`, `clients`, `turns/s` and the percentiles."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    figure = Figure(figsize=(4.2 * len(sizes), 4.4), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for panel, size in zip(panels, sizes, strict=True):
        _panel(panel, size, [row for row in rows if row["size"] == size])
    panels[0].set_ylabel("latency of a turn, ms")
    panels[0].legend(loc="upper left", frameon=False)
    figure.suptitle("Turnlog: latency of a durable turn, server on one core")
    figure.savefig(path)


def _panel(panel: Any, size: str, rows: Sequence[dict[str, Any]]) -> None:
    clients = [row["clients"] for row in rows]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    for key, colour, marker in LINES:
        panel.plot(clients, [row[key] for row in rows], color=colour, marker=marker, markersize=4, label=key[:3])
    panel.set_title(f"{size} replies, at most {max(row['turns/s'] for row in rows):.0f} turns/s", fontsize=11)
    panel.set_xlabel("concurrent clients")
    panel.xaxis.set_major_locator(FixedLocator(clients))
    panel.yaxis.set_major_locator(FixedLocator(TICKS_MS))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
