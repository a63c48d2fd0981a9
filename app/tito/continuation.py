"""The rule for a later turn: which ids follow a stored assistant message.

The messages around it are rendered twice, with the new messages and without them, and a random word stands in the
stored message for what was generated. Both renderings are cut behind the word. The last stored token says how much of
what follows was generated already. To import this loads no template engine.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

Message = Mapping[str, Any]

Render = Callable[[Message, Sequence[Message], bool], str]
"""Renders a history, an assistant message and what follows it; the flag asks for a generation prompt."""

Encode = Callable[[str], "array[int]"]
Decode = Callable[[Sequence[int]], str]


_TOOL_NAME = "turnlog_stands_for_tools"

STAND_IN_TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": _TOOL_NAME}}
"""Is rendered in place of a session's tools, unless the rule gets the real history."""


class NotAnExtension(Exception):
    """The template's rendering of the conversation does not begin with the stored tokens."""


class Extension(msgspec.Struct, frozen=True):
    """The next prompt: the stored ids without the last `trim`, then `ids`."""

    trim: int
    ids: array[int]


class Stops(msgspec.Struct, frozen=True):
    """Ids that end a generation. `roles` are those of them that begin the next message (GLM: `<|user|>`).

    `special`: all special tokens.
    """

    ids: frozenset[int]
    roles: frozenset[int]
    special: frozenset[int]


class ContinuationRule:
    """The rule, for one tokenizer. Thread-safe. `question` is a random word, the text of a history's last message."""

    def __init__(self, encode: Encode, decode: Decode, stops: Stops) -> None:
        self._encode = encode
        self._decode = decode
        self.stops = stops
        self.question, self._word = (f"turnlog{secrets.token_hex(8)}" for _ in range(2))

    def extension(self, render: Render, answer: Message, new: Sequence[Message], last: int) -> Extension:
        """What continues stored ids that end with id `last` of the message `answer`.

        The history of `render` ends with a message whose text is `question`. Raises NotAnExtension, and InvalidRequest
        from the template.
        """
        for marked in _marked(answer, self._word):
            alone, whole = render(marked, (), False), render(marked, new, True)
            if alone.count(self._word) == whole.count(self._word) == 1:
                break
        else:
            raise NotAnExtension("the chat template does not render an assistant message exactly once")
        head, followed = whole.split(self._word)
        asked = head.partition(self.question)[0] + self.question
        if not (head.startswith(asked) and alone.startswith(asked)):
            raise NotAnExtension("the chat template renders the earlier messages differently")
        if _TOOL_NAME in followed:  # Muse Glimmer shows them with each system message
            raise NotAnExtension("the chat template renders the tools again with these messages")
        ending = self._encode(alone.split(self._word)[1])
        return self.join(ending, self._encode(followed), last, called=bool(answer.get("tool_calls")))

    def join(self, alone: array[int], followed: array[int], last: int, *, called: bool) -> Extension:
        """What follows a message's text or its last call: if it is the last message, `alone`, and `followed` if others
        follow. `called`: the message ends with calls, of which the word stands in the last one."""
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, followed, strict=False))))
        begins = next((index for index in range(same, len(followed)) if followed[index] in self.stops.special), same)
        if self._decode(followed[same:begins]).strip():
            begins = same  # MiniCPM: the next message is bare text
        if last in self.stops.ids:
            if last in alone[:same]:
                return Extension(0, followed[same - alone[:same][::-1].index(last) :])
            if followed[begins : begins + 1] == array("i", [last]):  # GLM: it begins the next message
                return Extension(0, followed[begins + 1 :])
            if last in self.stops.roles:  # and another message follows
                return Extension(1, followed[begins:])
            if alone[same : same + 1] == array("i", [last]):  # gpt-oss: only the last message ends with <|return|>
                return Extension(1, followed[same:])
        if not called:  # the generation was cut, or ended with another stop token, which stays
            return Extension(0, followed)
        # Cut behind calls: which of their closing text is stored is not known, so the message just ends.
        return Extension(0, followed[next((i for i in range(same) if followed[i] in self.stops.ids), begins) :])


def _marked(answer: Message, word: str) -> Iterator[dict[str, Any]]:
    """The message with the word in the arguments of its last call, or as its content. Without its reasoning."""
    plain = {name: answer[name] for name in ("role", "content", "name", "tool_calls") if name in answer}
    if calls := answer.get("tool_calls"):
        function = {**calls[-1]["function"], "arguments": f'{{"text": "{word}"}}'}
        # Gemma 4 renders a message's text behind its calls' results; it was generated before them.
        yield {**plain, "content": "", "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
    yield {**plain, "content": word}
