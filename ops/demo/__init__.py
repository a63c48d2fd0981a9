"""A demo of crash recovery, about half a minute long: agents and an engine run while the server is killed and
restarted.

`python -m ops.demo` starts real processes and real OpenAI clients, and checks the result itself.
"""
