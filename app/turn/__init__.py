"""The turn, from a request to its commit; the only code that claims a session."""
