"""The web page: its routes, its static files and the readers of its views."""
