"""Real clients, unchanged, over Turnlog."""
