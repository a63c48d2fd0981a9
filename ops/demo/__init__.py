"""A demo of crash recovery in about half a minute: the server is killed while agents and an engine run.

`python -m ops.demo` starts real processes, and checks the result itself.
"""
