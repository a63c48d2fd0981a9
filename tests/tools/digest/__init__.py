"""`python -m tests.tools.digest [--before CHECKOUT]`: do the same requests still leave the same bytes?

A fixed list of requests of every protocol and route (`requests.py`, `orders.py`) is played one after the other to a
checkout's own server beside the seeded simulator, with a clock that stands still. Then everything that can be read is
read (`take.py`): each reply, each export in every shape and format, every list page by page, what the page shows, each
session's state, samples, events and tree; and each route, setting, event and command of the code (`surface.py`). Of
each a digest is printed. With `--before` the same is played to another checkout's server, and the first bytes that
differ are shown, with `--all` of each item. What must differ between two runs is taken out first, by `NORMALISED`.
"""
