"""All protocols, by their names in the log and by their paths."""

from __future__ import annotations

import re
from collections.abc import Mapping

from app.protocols.base import WireProtocol
from app.protocols.chat import Chat
from app.protocols.completions import Completions
from app.protocols.messages import Messages
from app.protocols.responses import Compaction, Responses
from app.protocols.tokens import SglangGenerate, VllmGenerate

PROTOCOLS: Mapping[str, WireProtocol] = {
    protocol.name: protocol
    for protocol in (Chat(), Completions(), Messages(), Responses(), VllmGenerate(), SglangGenerate())
}
"""By name, as the log has it."""

ROUTES: Mapping[str, WireProtocol] = {protocol.route: protocol for protocol in (*PROTOCOLS.values(), Compaction())}
"""By path below a base URL."""

_AT = re.compile(rf"({'|'.join(map(re.escape, ROUTES))})(/|$)")


def protocol_at(path: str) -> WireProtocol | None:
    """The protocol whose route the path has, with or without something before or behind it: its client sees errors."""
    matched = _AT.search(path)
    return None if matched is None else ROUTES[matched[1]]
