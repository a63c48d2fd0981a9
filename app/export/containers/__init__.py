"""What rows are written into: one file a format."""
