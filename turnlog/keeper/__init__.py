"""What `turnlog serve` becomes: a small process that holds the listening sockets and keeps servers behind them.

    keeper ── server    accepts, answers, owns the store
           └─ spare     has imported everything, opens nothing, waits

When the server dies, the spare takes its place and a new spare is started. The sockets stay open meanwhile, in the
keeper: the kernel accepts connections and keeps them until the next server asks for them, so that nobody is refused.
When the keeper dies, the others end at once.

This package imports nothing but the standard library, and `server` alone imports more, in the processes that serve.
"""

from __future__ import annotations
