"""Uploads a file in blocks, those that the bucket does not have."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import zstandard

from ops.blocks import manifest
from ops.blocks.bucket import Bucket
from ops.blocks.manifest import BLOCK_BYTES, DIGEST_BYTES, Head
from ops.blocks.pace import Pace

AT_ONCE = 16
"""Blocks that are read, compressed and uploaded together; memory holds as many."""

LEVEL = 1
"""Of zstd: most content in a store is compressed already."""


def upload(
    bucket: Bucket,
    file: Path,
    progress: Callable[[str], None],
    *,
    still_valid: Callable[[], None],
    percent: float,
    sessions: int,
    revision: str,
    incomplete: bool,
) -> Head:
    """Upload the file, which nobody writes to, and then the manifest; returns what the manifest says.

    `still_valid` is called now and then, and last before the manifest; it raises StartupError if other runs may have
    deleted blocks. Raises StartupError, OSError.
    """
    size = file.stat().st_size
    there = {found for one in bucket.listed("blocks/") if (found := manifest.digest_of(one.name)) is not None}
    digests = bytearray()
    blocks = sent = 0
    pace = Pace(percent, time.monotonic if bucket.is_folder else time.process_time)
    with file.open("rb") as read, ThreadPoolExecutor(AT_ONCE) as threads:
        while data := read.read(AT_ONCE * BLOCK_BYTES):
            missing = {}
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                digests += (found := manifest.digest(block))
                if found not in there:
                    missing[found] = block
            sent += sum(threads.map(partial(_send, bucket), missing.items()))
            blocks += len(missing)
            there.update(missing)
            progress(f"{100 * read.tell() // size} % of {size >> 20} MiB read, {sent / (1 << 20):.1f} MiB uploaded")
            still_valid()
            pace.rest()
    head = Head(
        name=manifest.new_name(),
        made_at=datetime.now(UTC),
        bytes=size,
        block_bytes=BLOCK_BYTES,
        blocks=len(digests) // DIGEST_BYTES,
        checksum=manifest.digest(digests).hex(),
        uploaded_blocks=blocks,
        uploaded_bytes=sent,
        sessions=sessions,
        revision=revision,
        incomplete=incomplete,
    )
    still_valid()
    manifest.write(bucket, head, bytes(digests))
    return head


def _send(bucket: Bucket, block: tuple[bytes, bytes]) -> int:
    """Upload one block; returns its compressed size in bytes."""
    name, data = block
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(data)
    bucket.put(manifest.block_name(name), packed)
    return len(packed)
