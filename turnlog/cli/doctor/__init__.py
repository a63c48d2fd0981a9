"""`turnlog doctor`: finds problems of the installation, and says what to do about them."""
