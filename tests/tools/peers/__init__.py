"""Other projects' own tests, run from outside against Turnlog. Their checkouts are given by path; none is kept here."""
