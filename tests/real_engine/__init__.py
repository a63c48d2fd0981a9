"""Real engines: what Turnlog exports is what the engine said, and what was computed.

vLLM runs a tiny model; SGLang is the published one but for its scheduler, which samples what a test tells it.
"""
