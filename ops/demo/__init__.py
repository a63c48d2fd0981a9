"""The main job in half a minute: agents, an engine, and a server that is killed under them.

`python -m ops.demo` starts real processes and real OpenAI clients, and judges what is left by itself.
"""
