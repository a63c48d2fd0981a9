"""Puts a file together from its blocks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import zstandard

from app.errors import StartupError
from ops.blocks import manifest
from ops.blocks.bucket import Bucket
from ops.blocks.manifest import Head
from ops.blocks.upload import AT_ONCE


def download(bucket: Bucket, name: str, target: Path, progress: Callable[[str], None]) -> Head:
    """Write the backup over the existing file `target`; each block's hash is checked.

    Raises StartupError if a block is missing or is not what was stored, OSError.
    """
    head, digests = manifest.read(bucket, name)
    pending: deque[Future[bytes]] = deque()
    written = 0
    with target.open("r+b") as file, ThreadPoolExecutor(AT_ONCE) as threads:
        os.ftruncate(file.fileno(), 0)
        try:
            for digest in manifest.each(digests):
                pending.append(threads.submit(_block, bucket, head, digest))
                if len(pending) == AT_ONCE:
                    written += file.write(pending.popleft().result())
                    progress(f"{100 * written // head.bytes} % of {head.bytes >> 20} MiB")
            while pending:
                written += file.write(pending.popleft().result())
        finally:
            threads.shutdown(cancel_futures=True)
    if written != head.bytes:
        raise StartupError(f"backup {name} in {bucket.url} has {written} bytes instead of {head.bytes}")
    return head


def _block(bucket: Bucket, head: Head, digest: bytes) -> bytes:
    name = manifest.block_name(digest)
    packed = bucket.get(name)
    if packed is None:
        raise StartupError(f"{bucket.url}/{name} is missing: backup {head.name} cannot be restored")
    try:
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=head.block_bytes)
    except zstandard.ZstdError:
        data = b""
    if manifest.digest(data) != digest:
        raise StartupError(f"{bucket.url}/{name} is damaged: backup {head.name} cannot be restored")
    return data
