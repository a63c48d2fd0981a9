"""A small client for rollout code, and the command line."""
