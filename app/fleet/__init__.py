"""The engines and the gates before them."""
