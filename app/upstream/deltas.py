"""Joins the deltas of a stream to the message that its engine would have sent as a whole. All streams are joined here.

Texts are joined, a content in text parts is read as text, and what is not known is carried. Of a tool call's delta, the
index, the id and the name are each unreliable: engines and the routers before them count indices from 1, count every
call as 0, or leave the index out; make a new id for each delta, or leave it out; repeat the name, send it in pieces, or
send it after the id. Which call a delta belongs to is told so:

    its index        is looked up, whatever its number; without one its id, and without that the newest call is meant
    index unused     begins a call, unless the delta has the id of a call, and no other name
    name             of a call without one: it is that call's, however late
                     with a new id: begins a call; but where the same name comes again while arguments are unfinished,
                     the engine repeats its head with each delta, and the call goes on
                     the same once more: the call goes on
                     another: a further piece of the name, until arguments begin; then it begins a call
    new id alone     the call goes on, by its first id

Arguments that are a whole JSON value do not go on: a delta that would add to them begins a call where its name says so,
and else the reply is refused. So are arguments of a call without a name. Two calls are never joined in silence.

A call is told once its arguments have begun, or something follows it: a client gets each head once, and whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from workers.content import text_of_parts
from workers.parse_json import Rejected

Delta = Mapping[str, Any]
"""A piece of the message: `content`, `reasoning` or `reasoning_content`, `tool_calls`, or what is not known; nothing in
it is null. A call's first piece has `index`, `id`, `type` and `function`."""

MAX_CALLS = 10_000
"""A message with more could not be sent back in a request (`app.domain.bounds`)."""

_TEXTS = frozenset(("content", "reasoning", "reasoning_content"))
_OF_CALLS = frozenset(("index", "id", "type", "function"))
_OF_FUNCTIONS = frozenset(("name", "arguments"))
_MARKS = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_LITERAL = 32
"""Characters of arguments that are no object, list or text: `null`, a number."""


class _Call:
    """A call so far. `place` is its number in the message, `next_id` a new id that came alone behind whole arguments:
    that of a call whose name has not come yet, or of nothing."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.id: Any = None
        self.next_id: Any = None
        self.type: Any = "function"
        self.name = ""
        self.is_told = False
        self._more: dict[str, Any] = {}
        self._inner: dict[str, Any] = {}
        self._arguments: list[str] = []
        self._size = self._read = self._depth = 0
        self._in_text = self._is_closed = False
        self._carried = ""

    @property
    def has_begun(self) -> bool:
        """Have arguments come?"""
        return bool(self._arguments)

    def add(self, arguments: str, more: dict[str, Any], inner: dict[str, Any]) -> None:
        """`more` and `inner` are fields of the call and of its function that are not known."""
        if arguments:
            self._arguments.append(arguments)
            self._size += len(arguments)
        self._more |= more
        self._inner |= inner

    def is_whole(self) -> bool:
        """Are the arguments a whole JSON value? Each is read once, however often this is asked."""
        text, self._carried = self._carried + "".join(self._arguments[self._read :]), ""
        self._read = len(self._arguments)
        for mark in _MARKS.findall(text):
            if mark == '"':
                self._in_text = not self._in_text
                self._is_closed |= not (self._in_text or self._depth)
            elif mark == "\\":
                self._carried = mark  # What it escapes has not come.
            elif not self._in_text and mark in ("{", "["):
                self._depth += 1
            elif not self._in_text and mark in ("}", "]"):
                self._depth -= 1
                self._is_closed |= self._depth <= 0
        if self._is_closed or self._depth or self._in_text:
            return self._is_closed
        return self._size <= _LITERAL and _is_json("".join(self._arguments))

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self._arguments), **self._inner}
        return {"id": self.id, "type": self.type, "function": function, **self._more}


class JoinedMessage:
    """The message of one stream."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._others: dict[str, Any] = {}
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[Any, _Call] = {}
        self._untold: list[_Call] = []

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def drop_calls(self) -> None:
        self._calls = []

    def add(self, delta: Delta) -> dict[str, Any]:
        """Add a delta; returns what is new. Raises Rejected."""
        news: dict[str, Any] = {}
        for name, value in delta.items():
            if value is None or name == "role":
                continue
            if type(value) is str:
                self._add_text(name, value, news)
            elif name == "tool_calls":
                if pieces := list(self._pieces(value)):
                    news[name] = pieces
            elif name in _TEXTS:
                parts = text_of_parts(value)
                if parts is None:
                    raise Rejected(f"{name} of a delta is not a text")
                self._add_text(name, parts.text, news)
                if parts.reasoning:
                    self._add_text("reasoning_content", parts.reasoning, news)
            else:
                self._others[name] = _merged(self._others.get(name), value)
                news[name] = value
        if self._untold and news and "tool_calls" not in news:
            news["tool_calls"] = self.rest()
        return news

    def _add_text(self, name: str, text: str, news: dict[str, Any]) -> None:
        self._texts.setdefault(name, []).append(text)
        if text:
            news[name] = news.get(name, "") + text

    def rest(self) -> list[dict[str, Any]]:
        """The calls that have not been told: the message ends, or goes on with something else. What has no name is no
        call yet: one that is cut there comes to nothing, as in an engine's whole reply."""
        return list(self._tell(max((call.place + 1 for call in self._untold if call.name), default=0)))

    def whole(self) -> dict[str, Any]:
        """As vLLM's parsers leave it: the content is null only beside reasoning or calls. Raises Rejected."""
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        content = texts.pop("content", "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {name: text or None for name, text in texts.items()} | self._others
        if any(call.has_begun and not call.name for call in self._calls):
            raise Rejected("a tool call of the stream has arguments and no name")
        if calls := [call.whole() for call in self._calls if call.is_told]:
            message["tool_calls"] = calls
        if not content and (calls or any(texts.get(name) for name in _TEXTS)):
            message["content"] = None
        return message

    # tool calls

    def _pieces(self, calls: Any) -> Iterator[dict[str, Any]]:
        if not isinstance(calls, list):
            raise Rejected("tool_calls of a delta is not a list")
        for place, delta in enumerate(calls):
            # Calls that come in one delta are several, also where they have no index.
            yield from self._piece(_object(delta, "a tool call"), place if len(calls) > 1 else None)

    def _piece(self, delta: dict[str, Any], place: int | None) -> Iterator[dict[str, Any]]:
        """Add a call's delta; yields what of it, and of the calls before it, can be told."""
        function = _object(delta.get("function") or {}, "function")
        index, call_id = delta.get("index"), delta.get("id") or None
        name, arguments = function.get("name") or "", function.get("arguments")
        if not (index is None or type(index) is int) or not isinstance(name, str) or isinstance(call_id, list | dict):
            raise Rejected("index, id or name of a tool call's delta is of a wrong type")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()  # From an engine that sends a call in one piece.
        index = place if index is None else index
        call, call_id = self._call_of(index, call_id, name, bool(arguments.strip()))
        if call is None:
            call = self._begin()
            if index is not None:
                self._by_index[index] = call
        is_more = name not in ("", call.name)
        more = {field: value for field, value in delta.items() if field not in _OF_CALLS and value is not None}
        inner = {field: value for field, value in function.items() if field not in _OF_FUNCTIONS and value is not None}
        if call.id is None and delta.get("id") == "":
            call.id = ""  # None, but in the engine's own spelling, which it is given back.
        call.name += name if is_more else ""
        call.add(arguments, more, inner)
        if not call.is_told:
            if call.id in (None, "") and call_id is not None:
                call.id = call_id
                self._by_id.setdefault(call_id, call)
            call.type = delta.get("type") or call.type
            if call.has_begun and call.name:
                yield from self._tell(call.place + 1)
        elif arguments or is_more or more or inner:
            told = {**({"name": name} if is_more else {}), "arguments": arguments, **inner}
            yield {"index": call.place, "function": told, **more}

    def _begin(self) -> _Call:
        if len(self._calls) == MAX_CALLS:
            raise Rejected(f"the stream has more than {MAX_CALLS} tool calls")
        call = _Call(len(self._calls))
        self._calls.append(call)
        self._untold.append(call)
        return call

    def _tell(self, end: int) -> Iterator[dict[str, Any]]:
        """The heads of the calls before `end`, in their order: clients expect each index after those below it."""
        while self._untold and self._untold[0].place < end:
            call = self._untold.pop(0)
            call.is_told = True
            yield {"index": call.place, **call.whole()}

    def _call_of(self, index: int | None, call_id: Any, name: str, adds: bool) -> tuple[_Call | None, Any]:
        """The call that a delta goes on with, None if it begins one, and the id that the delta means. `adds`: it has
        arguments. Raises Rejected."""
        call, by_id = self._by_index.get(index) if index is not None else None, self._by_id.get(call_id)
        if call is None and index is not None:
            if by_id is None or name not in ("", by_id.name) or (name and by_id.is_whole()):
                return None, call_id
            self._by_index[index] = by_id
        call = call or by_id or (self._calls[-1] if self._calls else None)
        if call is None:
            return None, call_id
        call_id = call_id or call.next_id
        is_new = call_id is not None and call.id not in (None, "", call_id)
        is_whole = (name != "" or is_new) and call.is_whole()
        if name and call.name:
            if is_new:
                begins = name != call.name or not call.has_begun or is_whole
            else:
                begins = is_whole and (name != call.name or (adds and call_id is None))
            if begins:
                return None, call_id
            if name != call.name and call.has_begun:
                raise Rejected("a tool call has another name while its arguments are unfinished")
        if is_whole and adds:
            raise Rejected("more arguments follow those of a tool call that were complete")
        if is_whole and is_new:
            call.next_id = call_id
        return call, call_id


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Rejected(f"{what} of a delta is not an object")
    return value


def _merged(before: Any, value: Any) -> Any:
    """An unknown field's pieces: lists, objects and texts are joined, of anything else the newest counts."""
    if isinstance(value, list):
        whole = before if isinstance(before, list) else []
        whole.extend(value)
        return whole
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{name: _merged(before.get(name), one) for name, one in value.items()}}
    if isinstance(before, str) and isinstance(value, str):
        return before + value
    return value


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
