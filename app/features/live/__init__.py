"""Live streams: a turn's deltas go to its client before the commit, where the engine can stream with ids.

    a turn     about to be sent to its engine, is asked for as a stream   (`TurnPoints.streaming`)

The client's side of it, which also writes streams of committed turns, is the kernel's (`turn.live`,
`api.client_stream`). Without this feature every stream is made of the committed turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.features.live.live import LiveTurns
    from app.services import Services


def add_to(services: Services) -> LiveTurns:
    from app.features.live.live import LiveTurns

    live = LiveTurns(services)
    services.points.streaming.append(live.streaming)
    return live
