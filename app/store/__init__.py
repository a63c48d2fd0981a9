"""The only code that knows SQL: the log, the claims, the content, and the writer that commits them."""
