"""Compares prompts that Turnlog extends with the engine's own rendering of the whole conversation."""
