"""A run that learns: asynchronous GRPO of a model of two layers, its rollouts by way of Turnlog."""
