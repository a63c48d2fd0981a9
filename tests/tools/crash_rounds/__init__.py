"""`python -m tests.tools.crash_rounds`: kill servers at random moments and look for what they had promised.

In every round clients take turns without a pause, each turn under an Idempotency-Key, until a `kill -9` at a
seeded moment: of the one server on SQLite, of one of several on PostgreSQL. Each client sends its turn in flight
again, same key, same body: to another server at once, or to the one that is started again. Then, seen from outside:
a turn that was answered 200 must be in its session for good, to the byte and once.
"""
