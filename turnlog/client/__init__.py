"""The client for rollout code and trainers, synchronous and asynchronous, over httpx."""
