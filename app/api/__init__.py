"""The routes. The other packages do the work, and `app.errors` defines the errors."""
