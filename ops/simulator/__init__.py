"""A stand-in for an inference engine, with the wire shapes of SGLang and vLLM.

It has a real tokenizer and chat template but no model: what it "generates" is
drawn from a seed, so a test can demand exact ids, logprobs and text, order any
fault, and a benchmark can share two cores with the service it measures.
"""
