"""The web page: its routes, its files, and what it shows."""
