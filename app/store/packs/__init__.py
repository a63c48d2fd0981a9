"""Replay payloads in object storage: a claim check.

The chunks of turns that end at the same time go into one object, a *pack*, before the commits that refer to them; a
chunk's row says pack, offset and length. So nothing that is acknowledged refers to an object that is not there. A pack
that no row refers to, after a crash between its upload and the commit or because all of its chunks are tombstoned, is
collected later. No object is ever changed: a pack that is mostly dead is copied into a new one.
"""
