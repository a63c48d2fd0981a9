"""The requests of a session of the real load, in chat, as Messages or as ids, and what its rows must then say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ops.bench.load import reply_message
from ops.bench.real.engine import CALLED
from ops.bench.real.material import BYTES_A_TOKEN, Material, Run, Tag

TOOLS = 24
PROPERTIES = 8
SYSTEM_SHARE = 0.3
"""Of what stands before the conversation; the rest are tools."""

MARK = b',"cache_control":{"type":"ephemeral"}'

_encode = msgspec.json.encode
_decode = msgspec.json.decode


class Reply(NamedTuple):
    """What a client read: the message as its next request has it, the text, and the calls' ids and arguments."""

    raw: bytes
    text: str
    calls: Sequence[tuple[str, str]] = ()


class Wire(NamedTuple):
    """A protocol. `user` writes a message of escaped text, with a cache mark if it is the newest, `tool` a call's
    result; `body` puts the request together from tools, system text and messages."""

    route: str
    user: Callable[[bytes, bytes], bytes]
    tool: Callable[[bytes, bytes, bytes], bytes]
    body: Callable[[Conversation, bytes], tuple[bytes, ...]]
    read: Callable[[bytes], Reply]
    is_ids: bool = False


class Item(NamedTuple):
    """A message: as it is sent, and while it is the newest; its tokens; of a reply, its turn from 0 and its call's id.
    `tag` are the last ids of a prompt of ids, behind those of the run."""

    raw: bytes
    newest: bytes
    run: Run
    turn: int | None = None
    call: bytes = b""
    tag: tuple[int, ...] = ()


class Turn(NamedTuple):
    """A turn that was answered: its prompt and itself, and the attempt that the client was given."""

    items: tuple[Item, ...]
    attempt: int


class Conversation:
    """`number` tells sessions apart; `base` is how many tokens stand before the conversation."""

    def __init__(self, number: int, base: int, material: Material, wire: Wire) -> None:
        self.wire = wire
        self.material = material
        self.turns: list[Turn] = []
        self._number = number
        self._place = number * 1_000_003 % 90_000_000
        self._items: list[Item] = []
        self._base = self._run(base)
        self.system = material.text((self._base[0], int(base * SYSTEM_SHARE)))
        self.tools = _tools(material, self._base[0], int(base * (1 - SYSTEM_SHARE)))
        self.tag = Tag("", (), (0, 0))

    def _run(self, count: int) -> Run:
        first, self._place = self._place, self._place + count
        return first, count

    def ask(self, new: int, sampled: int, *, kept: int | None = None, calls: bool = False) -> tuple[bytes, ...]:
        """The body of the next request: `kept` messages of before, or all, and one of `new` tokens."""
        if kept is not None:
            del self._items[kept:]
        wire, run = self.wire, self._run(new)
        name = str(self._number * 1000 + len(self.turns)) if wire.is_ids else f"s{self._number}-{len(self.turns)}"
        runs = _merged([self._base, *(item.run for item in self._items), run])
        tag = self.tag = Tag(name, runs, self._run(sampled), calls and not wire.is_ids)
        if wire.is_ids:
            ids = b"".join(self.material.ids_text([run])) + b"," + tag.ids()
            self._items.append(Item(ids, ids, run, tag=tuple(map(int, tag.ids().split(b",")))))
        else:
            text = tag.text() + self.material.text(run)
            if self._items and (called := self._items[-1].call):
                item = Item(wire.tool(text, called, b""), wire.tool(text, called, MARK), run)
            else:
                item = Item(wire.user(text, b""), wire.user(text, MARK), run)
            self._items.append(item)
        return wire.body(self, b",".join([*(item.raw for item in self._items[:-1]), self._items[-1].newest]))

    def base_ids(self) -> bytes:
        return b"".join(self.material.ids_text([self._base]))

    def answered(self, body: bytes) -> bool:
        """Go on with a reply. Is it what the engine said?"""
        reply, tag = self.wire.read(body), self.tag
        attempt = int(reply.text[5 : reply.text.index(">")])
        content, arguments = self.material.said(tag, attempt)
        said = [reply.text, *(one for _, one in reply.calls)]
        whole = [content, arguments] if arguments else [content]
        raw = b"".join(self.material.ids_text([tag.sampled])) if self.wire.is_ids else reply.raw
        call = reply.calls[0][0].encode() if reply.calls else b""
        self._items.append(Item(raw, raw, tag.sampled, len(self.turns), call))
        self.turns.append(Turn(tuple(self._items), attempt))
        return said == [_decode(b'"' + text + b'"', type=str) for text in whole]

    def row(self, turn: int) -> tuple[NDArray[np.int32], NDArray[np.float64], dict[int, slice]]:
        """Of the path that ends with a turn: its ids, the logprobs of what was sampled, NaN elsewhere, and where the
        turns' own tokens are."""
        places: dict[int, slice] = {}
        ids = [self.material.tokens([self._base])]
        logprobs = [np.full(self._base[1], np.nan)]
        at = self._base[1]
        for item in self.turns[turn].items:
            count = item.run[1] + len(item.tag)
            ids += [self.material.tokens([item.run]), np.array(item.tag, np.int32)]
            if item.turn is None:
                logprobs.append(np.full(count, np.nan))
            else:
                logprobs.append(self.material.logprobs(item.run, self.turns[item.turn].attempt))
                places[item.turn] = slice(at, at + count)
            at += count
        return np.concatenate(ids), np.concatenate(logprobs), places


def _merged(runs: Sequence[Run]) -> list[Run]:
    """With runs that follow each other as one."""
    merged = [runs[0]]
    for first, count in runs[1:]:
        if first == sum(merged[-1]):
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return merged


def _tools(material: Material, first: int, tokens: int) -> list[dict[str, Any]]:
    """Tools of so many tokens in all, each with a schema of some depth."""
    share = tokens * BYTES_A_TOKEN // (TOOLS * (PROPERTIES + 4)) // BYTES_A_TOKEN

    def text(number: int, count: int) -> str:
        return str(_decode(b'"' + material.text((first + number * 97, max(count, 1))) + b'"'))

    tools = []
    for number in range(TOOLS):
        fields = {
            f"field_{place}": {"type": "array", "items": {"type": "string", "description": text(number + place, share)}}
            for place in range(PROPERTIES)
        }
        schema = {"type": "object", "properties": fields, "required": ["field_0"]}
        tools.append(
            {"name": f"{CALLED}_{number}" if number else CALLED, "about": text(number, 3 * share), "schema": schema}
        )
    return tools


# chat


def _chat_user(text: bytes, mark: bytes) -> bytes:
    return b'{"role":"user","content":"' + text + b'"}'


def _chat_tool(text: bytes, call: bytes, mark: bytes) -> bytes:
    return b'{"role":"tool","tool_call_id":"' + call + b'","content":"' + text + b'"}'


def _chat_body(own: Conversation, messages: bytes) -> tuple[bytes, ...]:
    functions = [{"name": one["name"], "description": one["about"], "parameters": one["schema"]} for one in own.tools]
    tools = _encode([{"type": "function", "function": function} for function in functions])
    front = b'{"model":"m","max_tokens":32000,"temperature":1.0,"tools":'
    return (front, tools, b',"messages":[{"role":"system","content":"', own.system, b'"},', messages, b"]}")


def _chat_streamed(own: Conversation, messages: bytes) -> tuple[bytes, ...]:
    front, *rest = _chat_body(own, messages)
    return (b'{"stream":true,' + front[1:], *rest)


def _chat_read(body: bytes) -> Reply:
    raw = reply_message(body)
    message = _decode(raw)
    calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Reply(raw, message["content"] or "", calls)


def _events(body: bytes) -> list[Any]:
    return [_decode(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]


def _chat_read_stream(body: bytes) -> Reply:
    text, ids, arguments = "", [], ""
    for event in _events(body):
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                ids += [call["id"]] if call.get("id") else []
                arguments += call["function"].get("arguments") or ""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if ids:
        called = {"name": CALLED, "arguments": arguments}
        message["tool_calls"] = [{"id": ids[0], "type": "function", "function": called}]
    return Reply(_encode(message), text, [(one, arguments) for one in ids[:1]])


# Messages


def _blocks(role: bytes, block: bytes, mark: bytes) -> bytes:
    return b'{"role":"' + role + b'","content":[' + block + mark + b"}]}"


def _messages_user(text: bytes, mark: bytes) -> bytes:
    return _blocks(b"user", b'{"type":"text","text":"' + text + b'"', mark)


def _messages_tool(text: bytes, call: bytes, mark: bytes) -> bytes:
    block = b'{"tool_use_id":"' + call + b'","type":"tool_result","content":"' + text + b'"'
    return _blocks(b"user", block, mark)


def _messages_body(own: Conversation, messages: bytes) -> tuple[bytes, ...]:
    tools = [{"name": one["name"], "description": one["about"], "input_schema": one["schema"]} for one in own.tools]
    system = b'],"system":[{"type":"text","text":"' + own.system + b'"' + MARK + b'}],"tools":'
    more = b',"metadata":{"user_id":"user_1"},"max_tokens":32000,"temperature":1,"stream":true}'
    return (b'{"model":"m","messages":[', messages, system, _encode(tools), more)


def _messages_read(body: bytes) -> Reply:
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for event in _events(body):
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                blocks[event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                place = event["index"]
                arguments[place] = arguments.get(place, "") + event["delta"].get("partial_json", "")
    for place, said in arguments.items():
        blocks[place]["input"] = _decode(said)
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(blocks[place]["id"], said) for place, said in arguments.items()]
    return Reply(_encode({"role": "assistant", "content": blocks}), text, calls)


# ids


def _no_messages(text: bytes, *_: bytes) -> bytes:
    raise NotImplementedError


def _ids_body(own: Conversation, ids: bytes) -> tuple[bytes, ...]:
    front = b'{"model":"m","max_tokens":32000,"temperature":1.0,"prompt":['
    return (front, own.base_ids(), b",", ids, b"]}")


def _ids_read(body: bytes) -> Reply:
    return Reply(b"", _decode(body)["choices"][0]["text"])


CHAT = "/v1/chat/completions"
WIRES = {
    "chat": Wire(CHAT, _chat_user, _chat_tool, _chat_body, _chat_read),
    "chat-stream": Wire(CHAT, _chat_user, _chat_tool, _chat_streamed, _chat_read_stream),
    "messages": Wire("/v1/messages", _messages_user, _messages_tool, _messages_body, _messages_read),
    "ids": Wire("/v1/completions", _no_messages, _no_messages, _ids_body, _ids_read, is_ids=True),
}
