"""`python -m turnlog.cli`, where the script is not on the path."""

from __future__ import annotations

from turnlog.cli import main

if __name__ == "__main__":
    main()
