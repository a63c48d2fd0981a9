"""Tools for operators and developers. The service does not import them.

They are store maintenance, verification, the demo, benchmarks and the engine simulator.
"""
