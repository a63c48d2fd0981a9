"""What texts and numbers of a request may be: regular expressions as a schema has them, and bounds."""

from __future__ import annotations

ID = r"^[A-Za-z0-9._:-]{1,128}$"
"""Of a session, of an affinity, of a consumer. For `re.fullmatch`: `$` alone lets a line feed follow."""

NO_NUL = r"^[^\x00]*$"
"""PostgreSQL's text holds no NUL."""

TAG = r"^[^\x00-\x1f\x7f]{1,128}$"
"""Of a session's tag: no control characters. For `re.fullmatch`, as `ID`."""

MAX_INTEGER = 2**63 - 1
"""What a database's integer holds."""
