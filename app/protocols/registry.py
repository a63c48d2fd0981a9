"""All protocols, by their names in the log and by their paths."""

from __future__ import annotations

import re
from collections.abc import Mapping

from app.protocols.base import WireProtocol
from app.protocols.chat import CHAT
from app.protocols.completions import COMPLETIONS
from app.protocols.messages import MESSAGES
from app.protocols.responses import COMPACTION, RESPONSES
from app.protocols.tokens import SGLANG_GENERATE, VLLM_GENERATE

PROTOCOLS: Mapping[str, WireProtocol] = {
    protocol.name: protocol for protocol in (CHAT, COMPLETIONS, MESSAGES, RESPONSES, VLLM_GENERATE, SGLANG_GENERATE)
}
"""By name, as the log has it."""

ROUTES: Mapping[str, WireProtocol] = {protocol.route: protocol for protocol in (*PROTOCOLS.values(), COMPACTION)}
"""By path below a base URL."""

_AT = re.compile(rf"({'|'.join(map(re.escape, ROUTES))})(/|$)")


def protocol_at(path: str) -> WireProtocol | None:
    """The protocol whose route the path has, with or without something before or behind it: its client sees errors."""
    matched = _AT.search(path)
    return None if matched is None else ROUTES[matched[1]]
