"""What runs without the application: reading and judging what engines return. Imports nothing of `app`."""
