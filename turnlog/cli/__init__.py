"""The command line `turnlog`."""
