"""Wire formats of a turn."""
