"""A real engine on the CPU, vLLM with a model of two layers, in an environment of its own."""
