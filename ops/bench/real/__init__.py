"""The real load: a coding agent's sessions, `python -m ops.bench real`."""
