"""Sessions that capture text alone: a vendor's API, or an engine without ids, behind TURNLOG_TEXT_UPSTREAMS.

    create      `capture: "text"` names an upstream   (`Services.text_upstreams`)
    a turn      has a path of its own (`TurnPath`): no gate, placement, staging or control of engines takes part in it

Such turns are in the log as others are, without ids (`TurnCommitted.is_text`), and in no row with tokens: the kernel
knows both, so that sessions stay readable where this feature is off. Their turns are then 503 `no_upstream`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.features.text.calls import TextCalls
    from app.services import Services


def add_to(services: Services) -> TextCalls | None:
    upstreams = services.settings.text_upstreams
    if not upstreams:
        return None
    from app.features.text.calls import TextCalls
    from app.turn.points import TurnPoints
    from app.turn.turns import TurnPath

    calls = TextCalls(services, upstreams)
    services.turns.paths["text"] = TurnPath(TurnPoints(), calls)
    services.text_upstreams.update({upstream.name: upstream.model for upstream in upstreams})
    return calls
