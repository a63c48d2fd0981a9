"""Deletes old backups, and the blocks that no other backup has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ops.blocks import manifest
from ops.blocks.bucket import DELETED_AT_ONCE, Bucket
from ops.blocks.running import Run, under_way


class Pruned(NamedTuple):
    """The backups, blocks and compressed bytes that were deleted. `waits_for`: a backup that is being made, because of
    which nothing was."""

    backups: list[str]
    blocks: int = 0
    bytes: int = 0
    waits_for: str | None = None


def prune(bucket: Bucket, keep: int, progress: Callable[[str], None]) -> Pruned:
    """Keep the newest `keep` backups, at least one. Raises StartupError.

    An old backup's manifest is deleted before its blocks, so that none is left that cannot be restored. Blocks of
    backups that were never finished go too.
    """
    with under_way(bucket, "prune") as run:
        if others := run.others("backup"):
            return Pruned([], waits_for=others[0])
        run.forget_dead()
        names = manifest.names(bucket)
        old, kept = names[:-keep], names[-keep:]
        used: set[bytes] = set()
        for name in kept:
            used.update(manifest.each(manifest.read(bucket, name)[1]))
            run.renew()
        bucket.delete([f"backups/{name}" for name in old])
        return _delete_unused(bucket, used, Pruned(old), run, progress)


def _delete_unused(
    bucket: Bucket, used: set[bytes], pruned: Pruned, run: Run, progress: Callable[[str], None]
) -> Pruned:
    blocks = size = 0
    batch: list[str] = []
    for one in bucket.listed("blocks/"):
        if manifest.digest_of(one.name) in used:
            continue
        batch.append(one.name)
        blocks, size = blocks + 1, size + one.size
        if len(batch) == DELETED_AT_ONCE:
            run.renew()
            bucket.delete(batch)
            batch = []
            progress(f"{blocks} blocks deleted")
    run.renew()
    bucket.delete(batch)
    return pruned._replace(blocks=blocks, bytes=size)
