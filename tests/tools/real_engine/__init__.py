"""A real engine on the CPU, vLLM with a tiny model, in an environment of its own: for the tests that need one."""
