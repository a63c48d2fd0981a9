"""A simulated inference engine with the wire formats of SGLang and vLLM.

It has a real tokenizer and chat template, but no model: replies are drawn from a seed. So a test can require exact ids,
logprobs and text and can request any fault, and a benchmark can run it on the same two cores as the service.
"""
