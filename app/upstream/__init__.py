"""The only HTTP client to engines: requests, replies and dialects."""
