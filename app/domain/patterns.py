"""What texts and numbers of a request may be: regular expressions as a schema has them, and bounds."""

from __future__ import annotations

ID = r"^[A-Za-z0-9._:-]{1,128}$"
"""Of a session, of an affinity, of a consumer. For `re.fullmatch`: `$` alone lets a line feed follow."""

NO_NUL = r"^[^\x00]*$"
"""PostgreSQL's text holds no NUL."""

MAX_INTEGER = 2**63 - 1
"""What a database's integer holds."""
