"""What `turnlog serve` becomes: a supervisor that holds the listening sockets and keeps servers behind them.

    keeper ── server    accepts, answers, owns the store
           └─ spare     has imported everything, opens nothing, waits

When the server dies, the keeper promotes the spare and starts a new one. The sockets stay open in the keeper: the
kernel queues connections until the next server accepts them, so that no client is refused. When the keeper dies, its
servers end at once.

The keeper imports the standard library alone; `server` imports the rest, in the processes that serve.
"""

from __future__ import annotations
