"""Several API processes on one database, before several simulated engines."""
