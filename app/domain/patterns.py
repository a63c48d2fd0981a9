"""What texts and numbers of a request may be: regular expressions as a schema has them, and bounds."""

from __future__ import annotations

import math

ID = r"^[A-Za-z0-9._:-]{1,128}$"
"""Of a session, of an affinity, of a consumer. For `re.fullmatch`: `$` alone lets a line feed follow."""

NO_NUL = r"^[^\x00]*$"
"""PostgreSQL's text holds no NUL."""

TAG = r"^[^\x00-\x1f\x7f]{1,128}$"
"""Of a session's tag: no control characters. For `re.fullmatch`, as `ID`."""

MAX_INTEGER = 2**63 - 1
"""What a database's integer holds."""

MAX_FLOAT32 = 3.4028234663852886e38
"""Trainers keep rewards in 32 bits."""


def is_in_row(value: object) -> bool:
    """Can every container of an export hold the number: an integer of 64 bits, or a finite double?"""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return not isinstance(value, float) or math.isfinite(value)
