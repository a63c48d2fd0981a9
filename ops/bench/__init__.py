"""Benchmarks: the CPU and time of a turn, and how they change with long sessions, many clients and large stores."""
