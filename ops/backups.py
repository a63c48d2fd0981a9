"""Lists the backups in a bucket or folder and deletes old ones: `turnlog backups PLACE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from app.errors import StartupError
from ops.blocks import manifest
from ops.blocks.bucket import Bucket, bucket_url
from ops.blocks.prune import prune
from ops.keeping import DONE, CommandResult, Progress, run, run_as_turnlog

MIB = 1 << 20


def perform(place: str, keep: int | None, *, as_json: bool = False) -> int:
    """Run the command and return its exit code. `keep`: delete all but so many of the newest first; None for none."""
    return run("backups", partial(_list, place, keep), interrupted="run it again", as_json=as_json)


def _list(place: str, keep: int | None) -> CommandResult:
    url = bucket_url(place)
    if url is None:
        raise StartupError(f"{place} is not a URL, and not a folder")
    bucket = Bucket(url)
    fields: dict[str, Any] = {"place": url}
    lines = []
    if keep is not None:
        deletion = delete_old(bucket, keep, Progress("backups"))
        lines.append(deletion.line)
        fields |= deletion.fields
    heads = [manifest.head(bucket, name) for name in manifest.names(bucket)]
    lines = [*(f"{one.name}: {described(one)}" for one in heads), f"{len(heads)} backups", *lines]
    return CommandResult(DONE, lines, {**fields, "backups": [fields_of(one) for one in heads]})


class Deletion(NamedTuple):
    """What was deleted, as a line and as fields for `--json`."""

    line: str
    fields: Mapping[str, Any]


def delete_old(bucket: Bucket, keep: int, progress: Callable[[str], None]) -> Deletion:
    """Keep the newest `keep` backups. Raises StartupError."""
    done = prune(bucket, keep, progress)
    fields = {
        "deleted": done.backups,
        "deleted_blocks": done.blocks,
        "deleted_bytes": done.bytes,
        "deletion_waits_for": done.waits_for,
    }
    if done.waits_for is not None:
        line = f"nothing deleted: another backup is being made ({done.waits_for}), or was killed less than a day ago"
    else:
        line = f"deleted {len(done.backups)} backups and {done.blocks} blocks, {done.bytes / MIB:.1f} MiB"
    return Deletion(line, fields)


def described(head: manifest.Head) -> str:
    """A backup in one line, without its name."""
    what = ", incomplete: salvaged from a damaged store" if head.incomplete else ""
    return (
        f"{head.bytes / MIB:.1f} MiB, {head.sessions} sessions, revision {head.revision}; uploaded "
        f"{head.uploaded_blocks} of {head.blocks} blocks, {head.uploaded_bytes / MIB:.1f} MiB{what}"
    )


def fields_of(head: manifest.Head) -> dict[str, Any]:
    """A backup for `--json`."""
    return {
        "backup": head.name,
        "made_at": head.made_at.isoformat(),
        "bytes": head.bytes,
        "sessions": head.sessions,
        "revision": head.revision,
        "blocks": head.blocks,
        "uploaded_blocks": head.uploaded_blocks,
        "uploaded_bytes": head.uploaded_bytes,
        "incomplete": head.incomplete,
    }


if __name__ == "__main__":
    run_as_turnlog("backups")
