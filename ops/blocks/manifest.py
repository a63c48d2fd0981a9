"""The manifest of a backup: a line of JSON about it, and then the hashes of its blocks."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from app.errors import StartupError
from ops.blocks.bucket import Bucket

BLOCK_BYTES = 256 * 1024
"""Size of a block: 64 pages of 4 KiB."""

DIGEST_BYTES = 32

FORMAT = 1

LARGEST_HEAD = 4096


class Head(msgspec.Struct, kw_only=True, frozen=True):
    """What a backup says about itself. `checksum` is the hash of its blocks' hashes. `uploaded_bytes` is what it had
    to upload, compressed. `incomplete`: it was salvaged from a damaged store, and something is missing."""

    format: int = FORMAT
    name: str
    made_at: datetime
    bytes: int
    block_bytes: int
    blocks: int
    checksum: str
    uploaded_blocks: int
    uploaded_bytes: int
    sessions: int
    revision: str
    incomplete: bool = False


def new_name() -> str:
    """Names sort by time; two backups of one microsecond differ."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}"


def digest(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def block_name(name: bytes) -> str:
    """The object of the block with this hash."""
    text = name.hex()
    return f"blocks/{text[:2]}/{text}.zst"


def digest_of(block: str) -> bytes | None:
    """The hash of which `block` is the object; None if it is no block's name."""
    text = block.rpartition("/")[2].removesuffix(".zst")
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if block_name(found) == block else None


def write(bucket: Bucket, head: Head, digests: bytes) -> None:
    """Make the backup one that can be restored. Raises StartupError."""
    bucket.create(f"backups/{head.name}", msgspec.json.encode(head) + b"\n" + digests)


def names(bucket: Bucket) -> list[str]:
    """The backups that can be restored, oldest first. Raises StartupError."""
    return sorted(one.name.rpartition("/")[2] for one in bucket.listed("backups/"))


def head(bucket: Bucket, name: str) -> Head:
    """Raises StartupError if there is no such backup, or it cannot be read."""
    found = bucket.beginning(f"backups/{name}", LARGEST_HEAD)
    if found is None:
        raise StartupError(f"{bucket.url} has no backup {name}")
    return _head(bucket, name, found.partition(b"\n")[0])


def read(bucket: Bucket, name: str) -> tuple[Head, bytes]:
    """A backup's head and its blocks' hashes, checked. Raises StartupError."""
    found = bucket.get(f"backups/{name}")
    if found is None:
        raise StartupError(f"{bucket.url} has no backup {name}")
    line, _, digests = found.partition(b"\n")
    made = _head(bucket, name, line)
    if digest(digests).hex() != made.checksum or len(digests) != made.blocks * DIGEST_BYTES:
        raise StartupError(f"the list of blocks of backup {name} in {bucket.url} is damaged")
    return made, digests


def _head(bucket: Bucket, name: str, line: bytes) -> Head:
    try:
        found = msgspec.json.decode(line, type=Head)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StartupError(f"backup {name} in {bucket.url} is damaged: {error}") from error
    if found.format > FORMAT:
        raise StartupError(f"backup {name} in {bucket.url} was made by a later version of Turnlog")
    return found


def each(digests: bytes) -> Iterator[bytes]:
    for start in range(0, len(digests), DIGEST_BYTES):
        yield digests[start : start + DIGEST_BYTES]
