"""`python -m tests.tools.released --into FOLDER`: a store and the surface of this version, for later ones to try.

A fixed small scenario (`scenario.py`) is played to real servers over SQLite and over PostgreSQL, beside the simulator,
and ends with a `kill -9` in a turn. The store, its objects and its archives are packed (`packing.py`), with what the
same code then reads of an unpacked copy (`reading.py`). `surface.txt` lists what others rest on
(`tests.tools.digest.surface`); `--surface` writes that alone. A release does this once, and `test_released.py` tries
the code of today on each release's folder.
"""
