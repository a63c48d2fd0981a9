"""Tools that look for faults: `python -m tests.tools.<name>` in the checkout. Nothing outside `tests/` imports them."""
