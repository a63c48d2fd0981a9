"""All protocols: one for each package beside this module, which defines it as `PROTOCOL`."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping

import app.protocols
from app.protocols.base import WireProtocol


def _load() -> dict[str, WireProtocol]:
    names = sorted(found.name for found in pkgutil.iter_modules(app.protocols.__path__) if found.ispkg)
    loaded = [importlib.import_module(f"app.protocols.{name}").PROTOCOL for name in names]
    return {protocol.name: protocol for protocol in loaded}


PROTOCOLS: Mapping[str, WireProtocol] = _load()
"""By name, as the log has it."""

ROUTES: Mapping[str, WireProtocol] = {protocol.route: protocol for protocol in PROTOCOLS.values()}
"""By path below a base URL."""

_AT = re.compile(rf"({'|'.join(map(re.escape, ROUTES))})(/|$)")


def protocol_at(path: str) -> WireProtocol | None:
    """The protocol whose route the path has, with or without something before or behind it: its client sees errors."""
    found = _AT.search(path)
    return None if found is None else ROUTES[found[1]]
