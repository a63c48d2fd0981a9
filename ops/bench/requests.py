"""Requests that are meant to keep a server busy: as large as a body may be, and full of what costs time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from ops.bench.client import Connection

SIZE = 16 << 20
NONE = "nobody"

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SAID = b'{"role":"user","content":"Hello"}'


class Hostile(NamedTuple):
    """`route` is behind a new session's path, or behind nothing."""

    name: str
    body: Callable[[], bytes]
    route: str = CHAT
    method: str = "POST"
    in_session: bool = True

    async def path(self, connection: Connection) -> str:
        if not self.in_session:
            return self.route
        return f"/sessions/{(await connection.json('POST', '/sessions'))['session_id']}{self.route}"


def _filled(front: bytes, unit: bytes, end: bytes, size: int = SIZE) -> bytes:
    """`unit` is followed by a comma but for the last one; the whole has at most `size` bytes."""
    count = (size - len(front) - len(end)) // (len(unit) + 1)
    return front + b",".join([unit] * count) + end


def _keys(count: int) -> bytes:
    return b",".join(b'"key%d":1' % number for number in range(count))


def _chat(field: bytes, unit: bytes, size: int = SIZE) -> bytes:
    return _filled(b'{"messages":[' + _SAID + b'],"' + field + b'":[', unit, b"]}", size)


def _message(front: bytes, unit: bytes, end: bytes) -> bytes:
    """One message, filled."""
    count = (SIZE - 100) // len(unit)
    return b'{"messages":[{"role":"user","content":' + front + unit * count + end + b"}]}"


def _arguments(unit: str) -> bytes:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" + unit * (4 << 20) + "1]"}}
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()


TOOL = b'{"type":"function","function":{"name":"f"}}'

HOSTILE = (
    Hostile("nothing: a turn of 2 KiB", lambda: b'{"messages":[' + _SAID + b"]}"),
    Hostile("a million unknown keys", lambda: b'{"messages":[' + _SAID + b"]," + _keys(1_000_000) + b"}"),
    Hostile("500,000 tools", lambda: _chat(b"tools", TOOL, 500_000 * (len(TOOL) + 1))),
    Hostile("reward components, 45 MiB", lambda: b'{"reward":1,"components":{' + _keys(3_400_000) + b"}}", "/reward", "PUT"),
    Hostile("reward components, 16 MiB", lambda: b'{"reward":1,"components":{' + _keys(1_300_000) + b"}}", "/reward", "PUT"),
    Hostile("one message of text", lambda: _message(b'"', b"Hello, world. ", b'"')),
    Hostile("one message of escapes", lambda: _message(b'"', b"\\n", b'"')),
    Hostile("one message of letters beyond ASCII", lambda: _message(b'"', "é漢".encode(), b'"')),
    Hostile("one message of empty lists", lambda: _message(b"[", b"[],", b"1]")),
    Hostile("one message of numbers", lambda: _message(b"[", b"1,", b"1]")),
    Hostile("many messages", lambda: _filled(b'{"messages":[', _SAID, b"]}")),
    Hostile("as many messages as there may be", lambda: _filled(b'{"messages":[', _SAID, b"]}", 65_000 * (len(_SAID) + 1))),
    Hostile("256-byte messages", lambda: _filled(b'{"messages":[', b'{"role":"user","content":"' + b"a, b" * 57 + b'"}', b"]}")),
    Hostile("empty messages", lambda: _filled(b'{"messages":[', b"{}", b"]}")),
    Hostile("small but many messages", lambda: _filled(b'{"messages":[', b'{"role":""}', b"]}", 500 << 10)),
    Hostile("keys within a field", lambda: b'{"messages":[' + _SAID + b'],"x":{' + _keys(1_300_000) + b"}}"),
    Hostile("nvext", lambda: b'{"messages":[' + _SAID + b'],"nvext":{' + _keys(1_300_000) + b"}}", CHAT, "POST", False),
    Hostile("a parameter of text", lambda: b'{"messages":[' + _SAID + b'],"x":"' + b"Hello, world. " * (SIZE // 15) + b'"}'),
    Hostile("stop words", lambda: _chat(b"stop", b'"a"')),
    Hostile("deep nesting", lambda: b'{"messages":[' + _SAID + b'],"x":' + b"[" * (SIZE // 2 - 50) + b"]" * (SIZE // 2 - 50) + b"}"),
    Hostile("deep nesting in a message", lambda: _message(b"", b'{"a":', b"1")),
    Hostile("pairs of brackets and of quotes", lambda: _chat(b"x", b'["",{"":""}]')),
    Hostile("tool arguments of empty lists", lambda: _arguments("[],")),
    Hostile("four million ids", lambda: _chat(b"input_ids", b"123")),
    Hostile("four million ids as a prompt", lambda: _filled(b'{"prompt":[', b"123", b"]}"), COMPLETIONS),
    Hostile("a prompt of text", lambda: b'{"prompt":"' + b"Hello, world. " * (SIZE // 15) + b'"}', COMPLETIONS),
    Hostile("a prompt of escapes", lambda: b'{"prompt":"' + b"\\n" * (SIZE // 2 - 50) + b'"}', COMPLETIONS),
    Hostile("many prompts", lambda: _filled(b'{"prompt":[', b'""', b"]}"), COMPLETIONS),
    Hostile("metadata", lambda: b'{"metadata":{' + _keys(1_300_000) + b"}}", "/sessions", "POST", False),
    Hostile("metadata, 1 MiB", lambda: b'{"metadata":{' + _keys(80_000) + b"}}", "/sessions", "POST", False),
    Hostile("unknown fields of a session, 1 MiB", lambda: b"{" + _keys(80_000) + b"}", "/sessions", "POST", False),
    Hostile("samples", lambda: b'{"max_seq_len":[' + b"1," * (SIZE // 2 - 50) + b"1]}", "/samples"),
    Hostile("an acknowledgement of many groups", lambda: _filled(b'{"consumer":"c","groups":[', b'"g"', b"]}"), "/export/groups/ack", "POST", False),
    Hostile("an acknowledgement, 1 MiB", lambda: _filled(b'{"consumer":"c","groups":[', b'"g"', b"]}", 1 << 20), "/export/groups/ack", "POST", False),
    Hostile("SkyRL's pause", lambda: b'{"lora_name":{' + _keys(1_300_000) + b"}}", "/skyrl/v1/abort_lora_requests", "POST", False),
    Hostile("SkyRL's pause, 1 MiB", lambda: b'{"lora_name":"a",' + _keys(80_000) + b"}", "/skyrl/v1/wait_lora_unpaused", "POST", False),
)  # fmt: skip
