"""Archives: closed sessions whose events and content are Parquet files in object storage."""
