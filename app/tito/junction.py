"""The junction: what a chat template renders between the last token of a generated message and the next message.

It is derived by rendering a conversation whose assistant message is a unique word: what follows the word is what the
template puts after any assistant message. The real history is never rendered.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from app.errors import InvalidRequest, StartupError
from app.tito.extension import Extension, NotAnExtension
from app.tito.template import Message, Template

Encode = Callable[[str], "array[int]"]

_USER: Message = {"role": "user", "content": "a question"}
_TOOL: Message = {"role": "tool", "content": "a result", "tool_call_id": "call_0"}
_SYSTEM: Message = {"role": "system", "content": "a rule"}
_ASSISTANT: Message = {"role": "assistant", "content": "an answer"}


class Junction(msgspec.Struct, frozen=True):
    """`tail`: the ids after an assistant message (ChatML: `<|im_end|>` and a newline), whose text is `text`.

    `stops`: if the tail is empty, the role tokens that begin the next message and may end a generation (GLM:
    `<|user|>`, `<|observation|>`). `opening`: an assistant message's first ids; `openings`: any message's first id.
    """

    text: str
    tail: array[int]
    stops: frozenset[int]
    opening: array[int]
    openings: frozenset[int]

    @property
    def max_trim_tokens(self) -> int:
        return 1 if self.stops else 0

    def join(self, stored: Sequence[int], ids: array[int]) -> Extension:
        """`stored`: the last stored ids. `ids`: the tail and the new messages, encoded together.

        The sampled part of the tail is not repeated. A sampled role token stays if the next message begins with it, and
        is trimmed if the next message begins with another. No other sampled token is dropped; after a cut generation,
        or another stop token, the whole tail follows.
        """
        if self.stops and stored and stored[-1] in self.stops:
            return Extension(0, ids[1:]) if ids[:1] == array("i", stored[-1:]) else Extension(1, ids)
        sampled = self.sampled_of_tail(stored, ids)
        return Extension(0, ids[sampled:])

    def sampled_of_tail(self, stored: Sequence[int], ids: array[int]) -> int:
        """How many of the tail's first ids the stored ids already end with."""
        for count in range(min(len(self.tail), len(stored), len(ids)), 0, -1):
            if array("i", stored[-count:]) == ids[:count]:
                return count
        return 0


class JunctionRenderer:
    """Renders new messages after a dummy history and cuts that off."""

    def __init__(self, template: Template) -> None:
        self.word = f"turnlog{secrets.token_hex(8)}"
        self._template = template
        self.reply: Message = {"role": "assistant", "content": self.word}
        self._called = False

    def derive(self, encode: Encode, added: frozenset[int], pinned: Mapping[str, Any]) -> Junction:
        """Raises StartupError, in one line, if the template has no reliable junction."""
        try:
            return self._derive(encode, added, pinned)
        except (NotAnExtension, InvalidRequest) as error:
            raise StartupError(f"no junction can be derived from the chat template: {error}") from error

    def _derive(self, encode: Encode, added: frozenset[int], pinned: Mapping[str, Any]) -> Junction:
        text = self._after_reply([_USER, self.reply], pinned)
        user = self._new(text, [_USER], pinned)
        self._check_history_is_left_alone(text, user, pinned)
        roles = [encode(new)[0] for new in (user, *self._tool_results(pinned)) if new]
        others = [encode(new)[0] for new in self._others(text, pinned) if new]
        tail = encode(text)
        if tail and tail[0] not in added:
            raise NotAnExtension("an assistant message does not end with a special token")
        if not tail and not added.issuperset([*roles, *others]):
            raise NotAnExtension("neither does a message end nor the next one begin with a special token")
        opening = self._opening(encode, pinned)
        stops: frozenset[int] = frozenset() if tail else frozenset(roles)
        return Junction(text, tail, stops, opening, frozenset([*roles, *others, *opening[:1]]))

    def _check_history_is_left_alone(self, text: str, user: str, pinned: Mapping[str, Any]) -> None:
        """The text after a message must not depend on its place, and later messages must not change earlier ones."""
        histories: list[list[Message]] = [[_USER, _ASSISTANT, _USER], [_SYSTEM, _USER]]
        for history in histories:
            try:
                before = self._render(history, pinned)
            except InvalidRequest:
                continue  # a template without system messages: nothing of them can move
            whole = self._render([*history, self.reply, _USER], pinned, generation_prompt=True)
            if not whole.startswith(before) or self._cut(whole)[1] != text + user:
                raise NotAnExtension("it renders a message otherwise once others follow it")

    def _tool_results(self, pinned: Mapping[str, Any]) -> list[str]:
        """The rendering of a tool's result, the same with and without calls before it. Empty without tool messages."""
        found: list[str] = []
        for names in ((), ("first",), ("second",)):
            reply = self._calling(names)
            try:
                base = self._after_reply([_USER, reply], pinned)
                whole = self._after_reply([_USER, reply, _TOOL], pinned, generation_prompt=True)
            except (InvalidRequest, NotAnExtension):
                continue  # calls must be there, or content is left out beside them, or there are none at all
            if not whole.startswith(base):
                raise NotAnExtension("it ends a message otherwise once a tool's result follows")
            self._called = bool(names) if not found else self._called
            found.append(whole[len(base) :])
        if len(set(found)) > 1:
            raise NotAnExtension("it renders a tool's result by the name of the call")
        return found[:1]

    def _others(self, text: str, pinned: Mapping[str, Any]) -> list[str]:
        found = []
        for message in (_SYSTEM, _ASSISTANT):
            try:
                found.append(self._new(text, [message], pinned))
            except (InvalidRequest, NotAnExtension):
                continue  # refused here as it will be in a request
        return found

    def _opening(self, encode: Encode, pinned: Mapping[str, Any]) -> array[int]:
        """The common beginning of a generation prompt and of an assistant message, last or earlier."""
        before = self._render([_USER], pinned)
        prompted = self._render([_USER], pinned, generation_prompt=True)[len(before) :]
        last, _ = self._cut(self._render([_USER, self.reply], pinned))
        earlier, _ = self._cut(self._render([_USER, self.reply, _USER], pinned))
        return _common(encode(prompted), encode(last[len(before) :]), encode(earlier[len(before) :]))

    def _calling(self, names: Sequence[str]) -> Message:
        calls = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": {}}}
            for index, name in enumerate(names)
        ]
        return {**self.reply, "tool_calls": calls} if calls else self.reply

    def heads(self, tools: Sequence[Any] | None, arguments: Mapping[str, Any]) -> frozenset[bytes]:
        """Digests of the possible texts before the dummy's word: alone, before a generation, before each role.

        A template may treat the last message differently (Qwen3: an empty `<think>` block). Any other change means that
        new messages alter stored text.
        """
        reply = self._calling(("first",)) if self._called else self.reply
        endings: list[list[Message]] = [[self.reply], [self.reply, _USER], [reply, _TOOL], [reply]]
        before = self._render([_USER], arguments, tools)
        heads = set()
        for ending in endings:
            try:
                head, _ = self._cut(self._render([_USER, *ending], arguments, tools))
            except InvalidRequest:
                continue  # no tool messages in this template
            if not head.startswith(before):
                raise NotAnExtension("the chat template renders a message otherwise once others follow it")
            heads.add(digest(head))
        return frozenset(heads)

    def render_new(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, arguments: Mapping[str, Any]
    ) -> tuple[str, str]:
        """The text before the dummy's word, and the junction's text with the new messages and the generation prompt."""
        reply: Message = self.reply
        dropped = ""
        if self._called and messages and messages[0]["role"] == "tool":
            reply = self._calling(("first",))
            base = self._cut(self._render([_USER, reply], arguments, tools))[1]
            dropped = base[: len(base) - len(text)]
        head, after_reply = self._cut(self._render([_USER, reply, *messages], arguments, tools, generation_prompt=True))
        if not after_reply.startswith(dropped + text):
            raise NotAnExtension("the chat template ends the message before these in another way")
        return head, after_reply[len(dropped) :]

    def _new(self, text: str, messages: list[Message], arguments: Mapping[str, Any]) -> str:
        after_reply = self._after_reply([_USER, self.reply, *messages], arguments, generation_prompt=True)
        if not after_reply.startswith(text):
            raise NotAnExtension("it ends a message otherwise once another follows")
        return after_reply[len(text) :]

    def _after_reply(
        self, messages: list[Message], arguments: Mapping[str, Any], *, generation_prompt: bool = False
    ) -> str:
        return self._cut(self._render(messages, arguments, generation_prompt=generation_prompt))[1]

    def _cut(self, text: str) -> tuple[str, str]:
        parts = text.split(self.word)
        if len(parts) != 2:
            raise NotAnExtension("the chat template does not render an assistant message's content once")
        return parts[0], parts[1]

    def _render(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        return self._template.render(messages, tools, arguments, generation_prompt=generation_prompt)


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _common(*sequences: array[int]) -> array[int]:
    shortest = min(sequences, key=len)
    for index, token in enumerate(shortest):
        if any(ids[index] != token for ids in sequences):
            return shortest[:index]
    return shortest
