"""Sessions apart from their turns: create, close and erase, the cache, recovery, and reads of a session."""
