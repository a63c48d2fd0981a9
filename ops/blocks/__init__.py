"""Backups of an SQLite store in object storage or a folder, of which each uploads only what has changed.

A backup is a manifest, `backups/<name>`, which lists the blocks of the file in order. A block is BLOCK_BYTES of the
file, compressed, under the hash of its bytes: `blocks/<first two digits>/<hash>.zst`. Blocks that are there already,
of this file or of an earlier backup, are not uploaded again. The manifest is written last, so no manifest refers to a
block that is not there. `running/` names the runs that are under way, so that none deletes what another needs.
"""
