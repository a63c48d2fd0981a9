"""Items of a request's input as chat messages: their values, their parts and what they are.

Ids of responses and of their items each name a turn by a proof (`app.domain.proofs`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from app.domain.left_out import IMAGE_DETAIL, left_out_at
from app.domain.proofs import find_proof
from app.domain.request import as_raw, value_of
from app.errors import InvalidRequest, Unsupported
from workers.parse_json import MAX_DEPTH, too_deep

RESPONSE, REASONING, MESSAGE, FUNCTION, CUSTOM, ENCRYPTED = "resp_", "rs_", "msg_", "fc_", "ctc_", "tl_"
COMPACTION, SUMMARY = "cmp_", "tls_"
"""Of a compaction's id, and of its encrypted content: the summary stands behind it."""

MAX_PROOF = 256
"""Characters of a text in which a proof is looked for: ours are far shorter."""

_ITEM = re.compile(r"(rs|msg|fc|ctc)_\d{1,9}_[0-9a-f]{24}(?:_(\d{1,4})(r?))?")


def call_id(prefix: str, proof: str, index: int, is_raw: bool = False) -> str:
    """`is_raw`: the input of a custom tool's call is the sampled arguments as they are, since they hold no `input`."""
    return f"{prefix}{proof}_{index}{'r' if is_raw else ''}"


def is_raw(item_id: str, given: str) -> bool:
    """Is this input of a custom tool's call the sampled arguments as they are? Without an id of ours, an object is."""
    matched = _ITEM.fullmatch(item_id)
    if matched is not None:
        return bool(matched[3])
    return given.lstrip()[:1] == "{" and given.rstrip()[-1:] == "}"


def output_item(item_id: str) -> tuple[str, int] | None:
    """The kind of one of our output items, as its prefix, and its place among the calls; None for any other id."""
    matched = _ITEM.fullmatch(item_id)
    if matched is None or (matched[1] in ("fc", "ctc")) != (matched[2] is not None):
        return None
    return f"{matched[1]}_", int(matched[2] or 0)


def proof_in(text: str) -> str | None:
    return find_proof(text) if len(text) <= MAX_PROOF else None


def response_proof(response_id: str) -> str | None:
    """The proof in a response's id; None if it is not one of ours."""
    proof = proof_in(response_id)
    return proof if proof is not None and response_id == RESPONSE + proof else None


MAX_SHOWN = 64
"""Characters of a client's own word that an error repeats."""


def flat_name(namespace: str | None, called: str) -> str:
    return called if namespace is None else f"{namespace}__{called}"


def text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string")
    return value


def name(value: Any, path: str) -> str:
    if not text(value, path):
        raise InvalidRequest(f"{path} must not be empty")
    return str(value)


def text_or_none(value: Any, path: str) -> str | None:
    return None if value is None else text(value, path)


def flag_or_none(value: Any, path: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"{path} must be true or false")


def fields(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be an object")
    return value


def items(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} must be a list")
    return value


def placed(values: list[Any], path: str) -> list[tuple[str, Any]]:
    """The values of a list with their paths."""
    return [(f"{path}[{index}]", value) for index, value in enumerate(values)]


def one_of(value: Any, path: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed or not isinstance(value, str):
        raise InvalidRequest(f"{path} must be one of {', '.join(allowed)}")
    return value


def unsupported(path: str, value: Any = None) -> Unsupported:
    """`value` is what stands there, if it is a short word of the protocol."""
    shown = f" {value[:MAX_SHOWN]!r}" if isinstance(value, str) else ""
    return Unsupported(f"{path}{shown} is not supported: it cannot be sent to an engine")


_TEXT = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
"""A part's type and the field that holds its text."""


def text_of(value: Any, path: str, separator: str) -> str:
    """A content without images as one text."""
    content = content_of(value, path, separator, [])
    if not isinstance(content, str):
        raise unsupported(f"{path}: an image here")
    return content


def content_of(value: Any, path: str, separator: str, left_out: list[str]) -> str | list[dict[str, Any]]:
    """A content as chat content: texts become one text, since many chat templates take no list; with images, a list.

    What an engine is not sent of it is added to `left_out` (`app.domain.left_out`).
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} must be a string or a list")
    parts = [_part(part, f"{path}[{index}]", left_out) for index, part in enumerate(value)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return separator.join(part["text"] for part in parts)


def reasoning_text(item: dict[str, Any], path: str) -> str:
    """A reasoning item's text: its content's, else its summary's."""
    texts = _texts(item.get("content"), f"{path}.content", ("reasoning_text", "text"))
    summary = _texts(item.get("summary"), f"{path}.summary", ("summary_text",))
    return texts or summary


def _texts(value: Any, path: str, types: tuple[str, ...]) -> str:
    texts = []
    for index, part in enumerate([] if value is None else items(value, path)):
        at = f"{path}[{index}]"
        if fields(part, at).get("type") not in types:
            raise InvalidRequest(f"{at}.type must be {types[0]}")
        texts.append(text(part.get("text"), f"{at}.text"))
    return "".join(texts)


def _part(value: Any, path: str, left_out: list[str]) -> dict[str, Any]:
    part = fields(value, path)
    kind = text(part.get("type"), f"{path}.type")
    if kind in _TEXT:
        return {"type": "text", "text": text(part.get(_TEXT[kind]), f"{path}.{_TEXT[kind]}")}
    if kind == "input_image":
        return _image(part, path, left_out)
    raise unsupported(f"{path}.type", kind)


def _image(part: dict[str, Any], path: str, left_out: list[str]) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise unsupported(f"{path}.file_id")
    image = {"url": text(part.get("image_url"), f"{path}.image_url")}
    detail = text_or_none(part.get("detail"), f"{path}.detail")
    if detail == "original":  # Engines know low, high and auto.
        detail = "auto"
        left_out.append(left_out_at(IMAGE_DETAIL, path))
    return {"type": "image_url", "image_url": image if detail is None else {**image, "detail": detail}}


Item = dict[str, Any]

BETWEEN_TEXTS = "\n"
"""Between the texts of one message of the client's."""

BETWEEN_SYSTEM = "\n\n"

REFERENCE = "item_reference"
"""The key of a place in a message that a stored turn fills."""

MAX_REFERRED = 256
"""Responses whose items one request may refer to: each is read from the store."""

TRIGGER_ITEM = {"type": "compaction_trigger"}
"""Stands behind a history that is to be compacted."""

_COMPACT = (
    "Summarize this conversation for a model that will go on with the work and will see nothing of it but the user's "
    "messages and your summary: the goal, what was done and found out, decisions and constraints, the files, commands "
    "and values that matter, and what is left to do. Answer with the summary alone, and call no tool."
)

_SUMMARY = "A summary of the conversation so far, which itself is left out:\n\n"

_REASONING, _ITEMS_TEXT, _CALL = 0, 1, 2
"""Ranks of what an assistant's message holds: its parts stand in this order."""


class Conversation:
    """Builds the chat messages of a list of items. `system` are the leading texts of system and developer.

    `call_ids` are those of calls and outputs; `more_tools` are those that items offer, with their paths; `left_out` is
    what of the items no engine is sent. `continues`: a stored history stands before the items, so that none of them
    leads. `compacts`: the reply is to be a summary.
    """

    def __init__(self, continues: bool) -> None:
        self.system: list[str] = []
        self.proofs: list[str] = []
        self.call_ids: list[str] = []
        self.references: dict[str, None] = {}
        self.more_tools: list[tuple[str, Any]] = []
        self.left_out: list[str] = []
        self.compacts = False
        self._messages: list[msgspec.Raw] = []
        self._last: Item | None = None
        self._leads = not continues
        self._rank: int | None = None
        self._proof: str | None = None
        self._unfinished: tuple[str, str] | None = None

    @property
    def is_empty(self) -> bool:
        return self._last is None and not self.system

    def copy(self) -> Conversation:
        made = Conversation(False)
        made.system, made.proofs, made.more_tools = self.system[:], self.proofs[:], self.more_tools[:]
        made.references, made._messages = dict(self.references), self._messages[:]
        made.left_out, made.compacts, made.call_ids = self.left_out[:], self.compacts, self.call_ids[:]
        made._leads, made._rank, made._proof = self._leads, self._rank, self._proof
        made._unfinished = self._unfinished
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
        if self.compacts:
            raise InvalidRequest(f"{path}: nothing may follow a compaction_trigger")
        proof = None
        for claim in ("id", "encrypted_content"):
            claimed = text_or_none(item.get(claim), f"{path}.{claim}")
            proof = (None if claimed is None else proof_in(claimed)) or proof
        if proof is not None and proof not in self.proofs[-1:]:
            self.proofs.append(proof)
        adder(self, item, path, proof)
        self._unfinished = (path, kind) if item.get("status") == "in_progress" else None

    def begins_reply(self) -> bool:
        """Is the last item the beginning of the reply? Raises Unsupported for unfinished reasoning or calls."""
        if self._unfinished is None or self._last is None or self._last["role"] != "assistant":
            return False
        path, kind = self._unfinished
        if kind != "message":
            raise Unsupported(f"{path}.status in_progress: only a message can be continued")
        return True

    def raw(self, instructions: str) -> list[msgspec.Raw]:
        """The messages; `instructions` lead the system message."""
        texts = [one for one in (instructions, *self.system) if one]
        system = [as_raw({"role": "system", "content": BETWEEN_SYSTEM.join(texts)})] if texts else []
        return [*system, *self._messages, *([] if self._last is None else [as_raw(self._last)])]

    def _begin(self, message: Item) -> Item:
        """Begin a message; the one before it is complete."""
        if self._last is not None:
            self._messages.append(as_raw(self._last))
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
            self._assistant(_ITEMS_TEXT, proof)["content"] = text_of(content, at, "")
        elif role == "user":
            self._client({"role": "user", "content": content_of(content, at, BETWEEN_TEXTS, self.left_out)})
        elif self._leads:
            self.system.append(text_of(content, at, BETWEEN_TEXTS))
        else:
            self._client({"role": "user", "content": text_of(content, at, BETWEEN_TEXTS)})

    def add_reasoning(self, item: Item, path: str, proof: str | None) -> None:
        text = reasoning_text(item, path)
        message = self._assistant(_REASONING, proof)
        if text:
            message["reasoning_content"] = text

    def _call(self, called: str, called_id: Any, arguments: str, path: str, proof: str | None) -> None:
        given = name(called_id, f"{path}.call_id")
        self.call_ids.append(given)
        call = {"id": given, "type": "function", "function": {"name": called, "arguments": arguments}}
        self._assistant(_CALL, proof).setdefault("tool_calls", []).append(call)

    def add_function_call(self, item: Item, path: str, proof: str | None) -> None:
        arguments = text(item.get("arguments"), f"{path}.arguments")
        self._call(_called(item, path), item.get("call_id"), arguments, path, proof)

    def add_custom_call(self, item: Item, path: str, proof: str | None) -> None:
        given = text(item.get("input"), f"{path}.input")
        arguments = given if is_raw(item.get("id") or "", given) else msgspec.json.encode({"input": given}).decode()
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
            answered = name(answers, f"{path}.call_id")
            self.call_ids.append(answered)
            self._client({"role": "tool", "tool_call_id": answered, "content": content})

    def add_tools(self, item: Item, path: str, proof: str | None) -> None:
        """Tools that a client offers from here on; the engine is offered them from the beginning."""
        self.more_tools += placed(items(item.get("tools"), f"{path}.tools"), f"{path}.tools")

    def add_trigger(self, item: Item, path: str, proof: str | None) -> None:
        self._client({"role": "user", "content": _COMPACT})
        self.compacts = True

    def add_compaction(self, item: Item, path: str, proof: str | None) -> None:
        """What took the place of a history. Only the server that made it can read it."""
        summary = text(item.get("encrypted_content"), f"{path}.encrypted_content")
        if not summary.startswith(SUMMARY):
            raise Unsupported(f"{path}.encrypted_content was made by another server")
        self._client({"role": "user", "content": _SUMMARY + summary.removeprefix(SUMMARY)})

    def add_reference(self, item: Item, path: str, proof: str | None) -> None:
        referred = text(item.get("id"), f"{path}.id")
        referred_item = output_item(referred)
        if referred_item is None or proof is None:
            raise InvalidRequest(f"{path}.id names no output item of this session")
        self.references[proof] = None
        if len(self.references) > MAX_REFERRED:
            raise Unsupported(f"{path}: items of more than {MAX_REFERRED} responses are referred to; send them instead")
        place = {REFERENCE: referred}
        if referred_item[0] == REASONING:
            self._assistant(_REASONING, proof)["reasoning_content"] = place
        elif referred_item[0] == MESSAGE:
            self._assistant(_ITEMS_TEXT, proof)["content"] = place
        else:
            self._assistant(_CALL, proof).setdefault("tool_calls", []).append(place)


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
    "compaction": Conversation.add_compaction,
    "compaction_summary": Conversation.add_compaction,
    TRIGGER_ITEM["type"]: Conversation.add_trigger,
}
