"""A process with a pool, for tests that kill it: one child idle, one spinning in C code.

python -m helpers.pool_owner <path the spinning child writes its pid to> <deadline, s>
"""

from __future__ import annotations

import asyncio
import sys

from workers.pool import Pool


async def main(path: str, deadline_s: float) -> None:
    pool = Pool(2, deadline_s=deadline_s, memory_bytes=2**30, function="helpers.pool_jobs:act")
    pool.start()
    await pool.run(b"echo", b"x" * 2**20)
    await pool.run(f"spin {path}".encode(), b"")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
