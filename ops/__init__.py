"""Tools around the service: what runs beside it, never inside it."""
