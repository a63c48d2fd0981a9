"""A session around its turns: its life, its cache, what can be read of it."""
