"""Facts about model families that cannot be derived from a chat template, and, for a named family, what must be
derived.

A new family is one more row. Rows exist only for families whose real template `tests.tools.tito_check` runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.errors import StartupError


class Family(msgspec.Struct, frozen=True):
    """One row.

    `pinned` are template arguments that are always passed if the template reads them: otherwise it would change the
    reasoning of earlier turns when a user message follows. `ends_with` is the template's text after an assistant
    message, `stops` the role tokens that may end a generation instead; None: as derived. Given values must equal the
    derived ones; otherwise the template is not the family's and the start fails.
    """

    name: str
    pinned: Mapping[str, Any]
    ends_with: str | None = None
    stops: tuple[str, ...] | None = None


_KEEPS_REASONING: Mapping[str, Any] = {
    "clear_thinking": False,
    "preserve_thinking": True,
    "truncate_history_thinking": False,
}
"""GLM-4.7 and later read the first, Qwen3.6 and later the second, Nemotron 3 the third."""


def _chatml(name: str) -> Family:
    return Family(name, _KEEPS_REASONING, "<|im_end|>\n", ())


FAMILIES: Mapping[str, Family] = {
    row.name: row
    for row in (
        Family("auto", _KEEPS_REASONING),
        _chatml("qwen2.5"),
        _chatml("qwen3"),
        _chatml("qwen3-2507"),
        _chatml("qwen3.5"),
        _chatml("qwen3.6"),
        _chatml("qwen3.8"),
        _chatml("nemotron-3"),
        Family("glm-4.5", _KEEPS_REASONING, "", ("<|observation|>", "<|user|>")),
    )
}


def family(name: str) -> Family:
    """The row of that name. Raises StartupError, which names the value and the accepted ones."""
    row = FAMILIES.get(name)
    if row is None:
        raise StartupError(f"TURNLOG_TITO_FAMILY={name!r}: accepted are {', '.join(FAMILIES)}")
    return row
