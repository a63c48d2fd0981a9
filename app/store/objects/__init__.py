"""Replay payloads in object storage: a claim check.

Each chunk is an object of its own, which is created before the commit that refers to it and never changed. So nothing
that is acknowledged refers to an object that is not there. A chunk under `SMALL_BYTES` stays in its row.

    upload ──▶ commit ──▶ … ──▶ tombstone, and a line in `dead_objects`, in one commit ──▶ deletion, after `keep_s`

An object that no row ever referred to, after a crash between its upload and the commit, is found by a sweep.
"""
