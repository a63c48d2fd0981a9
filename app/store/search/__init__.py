"""The search index: its tables, how they are written, and how they are searched."""
