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
    """`route` is behind a new session's path, or behind nothing. So many are sent `at_once`."""

    name: str
    body: Callable[[], bytes]
    route: str = CHAT
    method: str = "POST"
    in_session: bool = True
    at_once: int = 1

    async def path(self, connection: Connection, parent: str) -> str:
        """`parent`: the session at whose engine a new one begins."""
        if not self.in_session:
            return self.route
        session = await connection.json("POST", "/sessions", {"parent_session_id": parent})
        return f"/sessions/{session['session_id']}{self.route}"


def _filled(front: bytes, unit: bytes, end: bytes, size: int = SIZE) -> bytes:
    """`unit` is followed by a comma but for the last one; the whole has at most `size` bytes."""
    count = (size - len(front) - len(end)) // (len(unit) + 1)
    return front + b",".join([unit] * count) + end


def _keys(count: int, value: bytes = b"1") -> bytes:
    return b",".join(b'"key%d":%b' % (number, value) for number in range(count))


def _chat(field: bytes, unit: bytes, size: int = SIZE) -> bytes:
    return _filled(b'{"messages":[' + _SAID + b'],"' + field + b'":[', unit, b"]}", size)


def _message(front: bytes, unit: bytes, end: bytes) -> bytes:
    """One message, filled."""
    count = (SIZE - 100) // len(unit)
    return b'{"messages":[{"role":"user","content":' + front + unit * count + end + b"}]}"


def _arguments(unit: str) -> bytes:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" + unit * (4 << 20) + "1]"}}
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()


def _field(name: bytes, value: bytes) -> bytes:
    return b'{"messages":[' + _SAID + b'],"' + name + b'":' + value + b"}"


def _nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def _admins(name: str, body: Callable[[], bytes], route: str) -> Hostile:
    return Hostile(name, body, route, in_session=False)


def _reward(count: int, value: bytes = b"1") -> Callable[[], bytes]:
    return lambda: b'{"reward":1,"components":{' + _keys(count, value) + b"}}"


def _messages(said: bytes, size: int = SIZE) -> Callable[[], bytes]:
    return lambda: _filled(b'{"messages":[', said, b"]}", size)


def _acknowledged(size: int, group: bytes = b'"g"') -> Callable[[], bytes]:
    return lambda: _filled(b'{"consumer":"c","groups":[', group, b"]}", size)


def _prompt(front: bytes, unit: bytes, end: bytes) -> Callable[[], bytes]:
    return lambda: b'{"prompt":' + front + unit * (SIZE // len(unit) - 10) + end + b"}"


TOOL = b'{"type":"function","function":{"name":"f"}}'
WORDS = b"Hello, world. "
ACK, PAUSE, WAIT = "/export/groups/ack", "/skyrl/v1/abort_lora_requests", "/skyrl/v1/wait_lora_unpaused"
MIB_KEYS, ALL_KEYS = 80_000, 1_250_000

HOSTILE = (
    Hostile("nothing: a turn of 2 KiB", lambda: b'{"messages":[' + _SAID + b"]}"),
    Hostile("a million unknown keys", lambda: _field(b"x", b"1," + _keys(1_000_000))),
    Hostile("500,000 tools", lambda: _chat(b"tools", TOOL, 500_000 * (len(TOOL) + 1))),
    Hostile("reward components, 45 MiB", _reward(3_400_000), "/reward", "PUT"),
    Hostile("reward components, 16 MiB", _reward(ALL_KEYS), "/reward", "PUT"),
    Hostile("components that are no numbers, 1 MiB", _reward(MIB_KEYS - 10_000, b'""'), "/reward", "PUT"),
    Hostile("one message of text", lambda: _message(b'"', WORDS, b'"')),
    Hostile("one message of escapes", lambda: _message(b'"', b"\\n", b'"')),
    Hostile("one message beyond ASCII", lambda: _message(b'"', "é漢".encode(), b'"')),
    Hostile("one message of empty lists", lambda: _message(b"[", b"[],", b"1]")),
    Hostile("one message of numbers", lambda: _message(b"[", b"1,", b"1]")),
    Hostile("many messages", _messages(_SAID)),
    Hostile("as many messages as may be", _messages(_SAID, 65_000 * (len(_SAID) + 1))),
    Hostile("messages of 256 bytes", _messages(b'{"role":"user","content":"' + b"a, b" * 57 + b'"}')),
    Hostile("messages of nothing", _messages(b"{}")),
    Hostile("messages of nothing, 500 KiB", _messages(b'{"role":""}', 500 << 10)),
    Hostile("keys within a field", lambda: _field(b"x", b"{" + _keys(ALL_KEYS) + b"}")),
    _admins("keys of nvext", lambda: _field(b"nvext", b"{" + _keys(ALL_KEYS) + b"}"), CHAT),
    Hostile("a parameter of text", lambda: _field(b"x", b'"' + WORDS * (SIZE // 15) + b'"')),
    Hostile("stop words", lambda: _chat(b"stop", b'"a"')),
    Hostile("deep nesting", lambda: _field(b"x", _nested(SIZE // 2 - 50))),
    Hostile("deep nesting in a message", lambda: _message(b"", b'{"a":', b"1")),
    Hostile("pairs of brackets and of quotes", lambda: _chat(b"x", b'["",{"":""}]')),
    Hostile("a message of brackets and escapes", lambda: _message(_nested(60) + b',"x":"', b"\\n", b'"')),
    Hostile("tool arguments of empty lists", lambda: _arguments("[],")),
    Hostile("four million ids", lambda: _chat(b"input_ids", b"123")),
    Hostile("four million ids, 8 at once", lambda: _chat(b"input_ids", b"123"), at_once=8),
    Hostile("four million ids as a prompt", _prompt(b"[", b"123,", b"1]"), COMPLETIONS),
    Hostile("a prompt of text", _prompt(b'"', WORDS, b'"'), COMPLETIONS),
    Hostile("a prompt of escapes", _prompt(b'"', b"\\n", b'"'), COMPLETIONS),
    Hostile("many prompts", _prompt(b"[", b'"",', b'""]'), COMPLETIONS),
    _admins("metadata", lambda: b'{"metadata":{' + _keys(ALL_KEYS) + b"}}", "/sessions"),
    _admins("metadata, 1 MiB", lambda: b'{"metadata":{' + _keys(MIB_KEYS) + b"}}", "/sessions"),
    _admins("fields of a session, 1 MiB", lambda: b"{" + _keys(MIB_KEYS) + b"}", "/sessions"),
    Hostile("samples", lambda: b'{"max_seq_len":[' + b"1," * (SIZE // 2 - 50) + b"1]}", "/samples"),
    _admins("an acknowledgement", _acknowledged(SIZE), ACK),
    _admins("an acknowledgement, 1 MiB", _acknowledged(1 << 20), ACK),
    _admins(
        "groups that are numbers, 1 MiB", lambda: _filled(b'{"consumer":"c","groups":[', b"1", b"]}", 1 << 20), ACK
    ),
    _admins("SkyRL's pause", lambda: b'{"lora_name":{' + _keys(ALL_KEYS) + b"}}", PAUSE),
    _admins("SkyRL's wait, 1 MiB", lambda: b'{"lora_name":"a",' + _keys(MIB_KEYS) + b"}", WAIT),
)
