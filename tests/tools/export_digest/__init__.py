"""`python -m tests.tools.export_digest [--before CHECKOUT]`: do the same requests still leave the same bytes?

A fixed list of requests (`requests.py`) is played one after the other to a checkout's own server beside the seeded
simulator, with a clock that stands still. Then everything that can be read is read: each reply, each export in every
shape and format, and each session's state, samples, events and tree. Of each a digest is printed. With `--before` the
same is played to another checkout's server, and the first bytes that differ are shown. What must differ between two
runs is taken out first, by `NORMALISED` in `take.py`.
"""
