"""Benchmarks: what a turn costs, how long it takes, and whether that stays so as a session grows."""
