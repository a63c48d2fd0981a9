"""Routes: thin. What they do is in `service`, what they refuse in `errors`."""
