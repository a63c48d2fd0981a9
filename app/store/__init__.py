"""The only code that knows SQL: the log, claims, content, and the writer that commits them."""
