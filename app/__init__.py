"""Turnlog: the session server between agent harnesses and inference engines that loses nothing."""
