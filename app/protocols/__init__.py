"""How a turn is spelled on the wire."""
