"""Routes: thin. What they do is in the other rooms, what they refuse in `errors`."""
