"""Turnlog: a durable session server between agent harnesses and inference engines."""
