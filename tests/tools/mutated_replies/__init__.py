"""Mutated engine replies through the real server: each one 502, or a commit that says what the reply said."""
