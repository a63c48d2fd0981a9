"""Adapters that carry Turnlog's rows into one trainer's own package, each with its extra. Nothing else imports them."""
