"""Code that runs without the application: parses and validates engines' replies. Imports nothing of `app`."""
