"""The engines and their health, and the log that all processes share."""
