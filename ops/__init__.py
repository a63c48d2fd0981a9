"""Operator and developer tools: store maintenance, verification, demo, benchmarks and the engine simulator. The service
does not import them."""
