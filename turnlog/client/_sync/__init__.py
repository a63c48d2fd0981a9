# Made from turnlog/client/_async by `python -m ops.unasync`. Do not edit.
"""The client. `turnlog.client._sync` is made from this package by `python -m ops.unasync`."""
