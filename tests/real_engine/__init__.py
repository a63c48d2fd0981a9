"""A real engine, vLLM with a tiny model: what Turnlog exports is what the engine said, and what the model computes."""
