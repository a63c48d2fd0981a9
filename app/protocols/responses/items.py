"""Responses input items as chat messages.

The messages of an item depend on it and its neighbours alone, so that a history that grows keeps its beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from app.domain.request import value_of
from app.errors import InvalidRequest, Unsupported
from app.protocols.responses import ids
from app.protocols.responses.parts import content_of, reasoning_text, text_of
from app.protocols.responses.tools import flat_name
from app.protocols.responses.values import fields, items, name, one_of, placed, text, text_or_none, unsupported
from workers.depth import MAX_DEPTH, too_deep

Item = dict[str, Any]

BETWEEN_TEXTS = "\n"
"""Between the texts of one message of the client's."""

BETWEEN_SYSTEM = "\n\n"

REFERENCE = "item_reference"
"""The key of a place in a message that a stored turn fills."""

MAX_REFERRED = 256
"""Responses whose items one request may refer to: each is read from the store."""

_REASONING, _TEXT, _CALL = 0, 1, 2
"""Ranks of what an assistant's message holds: its parts stand in this order."""


class Conversation:
    """Builds the chat messages of a list of items. `system` are the leading texts of system and developer.

    `more_tools` are those that items offer, with their paths; `left_out` is what of the items no engine is sent.
    `continues`: a stored history stands before the items, so that none of them leads.
    """

    def __init__(self, continues: bool) -> None:
        self.system: list[str] = []
        self.proofs: list[str] = []
        self.references: dict[str, None] = {}
        self.more_tools: list[tuple[str, Any]] = []
        self.left_out: list[str] = []
        self._messages: list[msgspec.Raw] = []
        self._last: Item | None = None
        self._leads = not continues
        self._rank: int | None = None
        self._proof: str | None = None

    @property
    def is_empty(self) -> bool:
        return self._last is None and not self.system

    def copy(self) -> Conversation:
        made = Conversation(False)
        made.system, made.proofs, made.more_tools = self.system[:], self.proofs[:], self.more_tools[:]
        made.references, made._messages = dict(self.references), self._messages[:]
        made.left_out = self.left_out[:]
        made._leads, made._rank, made._proof = self._leads, self._rank, self._proof
        if self._last is not None:
            made._last = dict(self._last)
            if "tool_calls" in self._last:
                made._last["tool_calls"] = list(self._last["tool_calls"])
        return made

    def read(self, index: int, raw: msgspec.Raw) -> None:
        path = f"input[{index}]"
        if too_deep(bytes(raw)):
            raise InvalidRequest(f"{path} nests deeper than {MAX_DEPTH} levels")
        self.add(value_of(raw, path), path)

    def add(self, value: Any, path: str) -> None:
        item = fields(value, path)
        kind = text_or_none(item.get("type"), f"{path}.type")
        if kind is None:
            kind = "message" if "role" in item or "id" not in item else "item_reference"
        adder = _ADDERS.get(kind)
        if adder is None:
            raise unsupported(f"{path}.type", kind)
        proof = None
        for claim in ("id", "encrypted_content"):
            found = text_or_none(item.get(claim), f"{path}.{claim}")
            proof = (None if found is None else ids.proof_in(found)) or proof
        if proof is not None and proof not in self.proofs[-1:]:
            self.proofs.append(proof)
        adder(self, item, path, proof)

    def raw(self, instructions: str) -> list[msgspec.Raw]:
        """The messages; `instructions` lead the system message."""
        texts = [one for one in (instructions, *self.system) if one]
        system = [_raw({"role": "system", "content": BETWEEN_SYSTEM.join(texts)})] if texts else []
        return [*system, *self._messages, *([] if self._last is None else [_raw(self._last)])]

    def _begin(self, message: Item) -> Item:
        """Begin a message; the one before it is complete."""
        if self._last is not None:
            self._messages.append(_raw(self._last))
        self._last = message
        return message

    def _client(self, message: Item) -> None:
        """A message that is not the assistant's."""
        self._leads, self._rank = False, None
        self._begin(message)

    def _assistant(self, rank: int, proof: str | None) -> Item:
        """The assistant's message for a part of this rank: the last one, or one that begins here.

        Parts of one reply come in the order of their ranks. Parts of two turns are two messages, if their ids say so.
        """
        rises = self._rank is not None and (rank > self._rank or rank == self._rank == _CALL)
        is_another = proof is not None and self._proof is not None and proof != self._proof
        message = self._last
        if message is None or not rises or is_another:
            message = self._begin({"role": "assistant", "content": None})
            self._proof = None
        self._leads, self._rank, self._proof = False, rank, proof or self._proof
        return message

    def add_message(self, item: Item, path: str, proof: str | None) -> None:
        role = one_of(item.get("role"), f"{path}.role", ("user", "assistant", "system", "developer"))
        content, at = item.get("content"), f"{path}.content"
        if role == "assistant":
            self._assistant(_TEXT, proof)["content"] = text_of(content, at, "")
        elif role == "user":
            self._client({"role": "user", "content": content_of(content, at, BETWEEN_TEXTS, self.left_out)})
        elif self._leads:
            self.system.append(text_of(content, at, BETWEEN_TEXTS))
        else:
            self._client({"role": "user", "content": text_of(content, at, BETWEEN_TEXTS)})

    def add_reasoning(self, item: Item, path: str, proof: str | None) -> None:
        found = reasoning_text(item, path)
        message = self._assistant(_REASONING, proof)
        if found:
            message["reasoning_content"] = found

    def _call(self, called: str, called_id: Any, arguments: str, path: str, proof: str | None) -> None:
        given = name(called_id, f"{path}.call_id")
        call = {"id": given, "type": "function", "function": {"name": called, "arguments": arguments}}
        self._assistant(_CALL, proof).setdefault("tool_calls", []).append(call)

    def add_function_call(self, item: Item, path: str, proof: str | None) -> None:
        arguments = text(item.get("arguments"), f"{path}.arguments")
        self._call(_called(item, path), item.get("call_id"), arguments, path, proof)

    def add_custom_call(self, item: Item, path: str, proof: str | None) -> None:
        given = text(item.get("input"), f"{path}.input")
        arguments = given if ids.is_raw(item.get("id") or "", given) else msgspec.json.encode({"input": given}).decode()
        self._call(_called(item, path), item.get("call_id"), arguments, path, proof)

    def add_shell_call(self, item: Item, path: str, proof: str | None) -> None:
        action = fields(item.get("action"), f"{path}.action")
        called_id = item.get("call_id") or item.get("id")
        self._call("local_shell", called_id, msgspec.json.encode(action).decode(), path, proof)

    def add_output(self, item: Item, path: str, proof: str | None) -> None:
        answers = item.get("call_id")
        if answers is None and item.get("type") == "local_shell_call_output":
            answers = item.get("id")
        content = content_of(item.get("output"), f"{path}.output", BETWEEN_TEXTS, self.left_out)
        if answers is None and item.get("name") is not None:  # Codex tells its goals so, as nobody's result.
            self._client({"role": "user", "content": content})
        else:
            self._client({"role": "tool", "tool_call_id": name(answers, f"{path}.call_id"), "content": content})

    def add_tools(self, item: Item, path: str, proof: str | None) -> None:
        """Tools that a client offers from here on; the engine is offered them from the beginning."""
        self.more_tools += placed(items(item.get("tools"), f"{path}.tools"), f"{path}.tools")

    def add_reference(self, item: Item, path: str, proof: str | None) -> None:
        referred = text(item.get("id"), f"{path}.id")
        found = ids.output_item(referred)
        if found is None or proof is None:
            raise InvalidRequest(f"{path}.id names no output item of this session")
        self.references[proof] = None
        if len(self.references) > MAX_REFERRED:
            raise Unsupported(f"{path}: items of more than {MAX_REFERRED} responses are referred to; send them instead")
        place = {REFERENCE: referred}
        if found[0] == ids.REASONING:
            self._assistant(_REASONING, proof)["reasoning_content"] = place
        elif found[0] == ids.MESSAGE:
            self._assistant(_TEXT, proof)["content"] = place
        else:
            self._assistant(_CALL, proof).setdefault("tool_calls", []).append(place)


def _raw(message: Item) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(message))


def _called(item: Item, path: str) -> str:
    """The name as the engine knows it; a model may call a tool by an empty one."""
    namespace = text_or_none(item.get("namespace"), f"{path}.namespace")
    return flat_name(namespace, text(item.get("name"), f"{path}.name"))


_ADDERS: dict[str, Callable[[Conversation, Item, str, str | None], None]] = {
    "message": Conversation.add_message,
    "reasoning": Conversation.add_reasoning,
    "function_call": Conversation.add_function_call,
    "function_call_output": Conversation.add_output,
    "custom_tool_call": Conversation.add_custom_call,
    "custom_tool_call_output": Conversation.add_output,
    "local_shell_call": Conversation.add_shell_call,
    "local_shell_call_output": Conversation.add_output,
    "additional_tools": Conversation.add_tools,
    "item_reference": Conversation.add_reference,
}
