"""`turnlog doctor`: what is wrong here, or soon will be, and what to do about it."""
