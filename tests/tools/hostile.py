"""Large bodies that the service refuses after it has read them: what an attacker sends to fill its memory."""

from __future__ import annotations

import json

SURROGATE = "\\ud83d"
"""Half of one: such a body is read a second time, mended."""


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """By name: the route below a session, and a body of about `size` bytes."""
    message = '{"role":"user","content":"x"}'
    many = ",".join([message] * (size // len(message)))
    pairs = ",".join(f'"field{number:07}":1' for number in range(size // 16))
    nested = "[" * (size // 2) + "]" * (size // 2)
    odd = '{"role":"nobody","content":1}'
    text = json.dumps("x" * size)
    chat = {
        "many messages": f'{{"messages":[{many}]}}',
        "many messages, streamed": f'{{"stream":true,"messages":[{many}]}}',
        "deep": f'{{"messages":[{{"role":"user","content":{nested}}}]}}',
        "many fields": f'{{"messages":[{message}],{pairs}}}',
        "a huge number": f'{{"messages":[{message}],"seed":{"9" * size}}}',
        "no JSON": f'{{"messages":[{many}',
        "another conversation": f'{{"messages":[{{"role":"user","content":{text}}}]}}',
        "half a surrogate": f'{{"messages":[{{"role":"user","content":{text[:-1]}{SURROGATE}"}}]}}',
    }
    others = {
        "Messages": ("messages", f'{{"model":"m","max_tokens":1,"messages":[{many},{odd}]}}'),
        "Messages, streamed": ("messages", f'{{"model":"m","max_tokens":1,"stream":true,"messages":[{many},{odd}]}}'),
        "Responses": ("responses", f'{{"model":"m","input":[{many},{{"type":"nothing"}}]}}'),
        "completions": ("completions", f'{{"model":"m","prompt":[{"1," * (size // 2)}"x"]}}'),
    }
    named = {name: ("chat/completions", body) for name, body in chat.items()} | others
    return {name: (f"v1/{route}", body.encode()) for name, (route, body) in named.items()}
