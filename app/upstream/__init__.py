"""The engines: how they are asked, and what of their answer is theirs to say."""
