"""The rules of a session, pure: no I/O, no clock, no randomness, no framework."""
