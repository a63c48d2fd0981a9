"""The client. `turnlog.client._sync` is made from this package by `python -m ops.unasync`."""
