"""Sessions whose requests, labels and rewards hold what a row may not be able to hold, exported in every form."""
