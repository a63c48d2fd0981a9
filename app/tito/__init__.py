"""Token-in, token-out: prompts as ids, built by the model's own chat template and tokenizer."""
