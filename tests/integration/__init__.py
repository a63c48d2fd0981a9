"""Turnlog as its clients see it: real HTTP, a real server process, a simulated engine."""
