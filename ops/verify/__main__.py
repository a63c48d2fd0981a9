"""The command; see `ops.keeping` for its exit codes."""

from __future__ import annotations

import sys

from ops.keeping import parser
from ops.verify import perform


def main() -> int:
    arguments = parser("verify", "Check a store against its own log.").parse_args()
    return perform(arguments.database_url)


if __name__ == "__main__":
    sys.exit(main())
