"""What a chat template can do, found out at start: conversations continued by the rule, and rendered whole.

A template that keeps state over its history (DeepSeek V3 opens a block for the first results only) is right if the rule
gets the real history. What is wrong even then, or what the template cannot render, is refused by the name of its shape.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from app.errors import InvalidRequest, StartupError
from app.tito.continuation import STAND_IN_TOOL, ContinuationRule, Decode, Encode, Message, NotAnExtension, Stops
from app.tito.normalise import REASONING, MessageFormat

TOOL_NAME = "look_up_weather"

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name."},
                "days": {"type": "integer", "description": "How many days to look ahead."},
            },
            "required": ["city"],
        },
    },
}

PLAIN = "an answer"

Tools = Sequence[Mapping[str, Any]] | None

RenderProbe = Callable[[MessageFormat, Tools, Sequence[Message], bool], str]
"""Renders tools and messages in a format; the flag asks for a generation prompt."""


def shapes(before: Sequence[Message], answer: Message, new: Sequence[Message], *, tools: bool) -> list[str]:
    """The names of a turn's shapes, by the calls of the stored message and the results among the new messages.

    A turn is refused if one of them is. A conversation of the battery is there for the last of its shapes.
    """
    calls = [str(call.get("id")) for call in answer.get("tool_calls") or ()]
    if not calls:
        if tools:
            return [f"{PLAIN} with tools"]
        return [f"{PLAIN} after a system message" if before[:1] and before[0]["role"] != "user" else PLAIN]
    results = [str(message.get("tool_call_id")) for message in new if message["role"] == "tool"]
    if not results:
        names = ["calls without results"]
    else:
        order = "results" if results == calls else "some of the results"
        if results != calls and sorted(results) == sorted(calls):
            order = "results in another order"
        names = [f"{'a call' if len(calls) == 1 else 'several calls'} and {order}"]
        if new[-1]["role"] != "tool":
            names.append("results and a message")
    return [*names, "a call beside text"] if answer.get("content") else names


class Conversation(msgspec.Struct, frozen=True):
    """`answer` is the stored message."""

    before: Sequence[Message]
    answer: Message
    new: Sequence[Message]
    tools: bool = True


def conversations(*, system: bool = True, silent: bool = True) -> list[Conversation]:
    """`system`: some begin with a system message. `silent`: most messages with calls have no text."""
    rule = [_message("system", "a rule")] if system else []
    ask, more = _message("user", "a question"), _message("user", "thanks")
    first, second = _answer(1, 1, text=not silent), _answer(2, 1, text=not silent, reasoning=True)
    return [
        Conversation([ask], _answer(1), [more], False),
        Conversation([*rule, ask], _answer(1, reasoning=True), [more], False),
        Conversation([*rule, ask, _answer(1), more], _answer(2, reasoning=True), [more]),
        Conversation([ask, first, _result(1), second, _result(2)], _answer(3), [more]),
        Conversation([ask], first, [_result(1)]),
        Conversation([*rule, ask, first, _result(1)], second, [_result(2)]),
        Conversation([ask, first, _result(1), _answer(3), more], second, [_result(2)]),
        Conversation([ask], _answer(1, 1), [_result(1)]),
        Conversation([*rule, ask, first, _result(1)], _answer(2, 1), [_result(2)]),
        Conversation([ask], first, [_result(1), more]),
        Conversation([ask], first, [more]),
        Conversation([ask], _answer(1, 2, text=not silent), [_result(1), _result(1, 1)]),
        Conversation([*rule, ask], _answer(1, 3, text=not silent), [_result(1, 2), _result(1), _result(1, 1)]),
        Conversation([ask], _answer(1, 2, text=not silent), [_result(1, 1)]),
    ]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _answer(number: int, calls: int = 0, *, text: bool = True, reasoning: bool = False) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": f"answer{number}" if text else ""}
    if reasoning:
        message["reasoning_content"] = f"thought{number}"
    if calls:
        message["tool_calls"] = [_call(number, index) for index in range(calls)]
    return message


def _call(number: int, index: int) -> Message:
    function = {"name": TOOL_NAME, "arguments": {"days": index, "city": f"city{number}x{index}"}}
    return {"id": _call_id(number, index), "type": "function", "function": function}


def _call_id(number: int, index: int) -> str:
    return f"call{number}x{index:03}"  # nine letters and digits: Mistral takes no others


def _result(number: int, index: int = 0) -> Message:
    return {"role": "tool", "content": f"result{number}x{index}", "tool_call_id": _call_id(number, index)}


class Findings(msgspec.Struct, frozen=True):
    """What a template renders, and in which format.

    `tools`: it renders tools. `refused`: why turns of a shape cannot be continued. `full_history`: the rule needs the
    real history. `trims`: the last stored token may be left out.
    """

    message_format: MessageFormat
    tools: bool
    stops: Stops
    full_history: bool
    refused: Mapping[str, str]
    trims: bool


def examine(
    render: RenderProbe,
    encode: Encode,
    decode: Decode,
    message_format: MessageFormat,
    special: frozenset[int],
    stops: frozenset[int],
) -> Findings:
    """`special`: the tokenizer's special tokens. `stops`: what is known to end a generation.

    Raises StartupError if not even plain answers can be continued.
    """

    def shows(messages: Sequence[Message], tools: Tools, *words: str) -> Callable[[MessageFormat], bool]:
        return lambda message_format: all(word in render(message_format, tools, messages, True) for word in words)

    ask = _message("user", "a question")
    shown, why = _first(_variants(message_format, "parts"), shows([ask, _answer(1), ask], None, "answer1"))
    if shown is None:
        raise StartupError(f"the chat template cannot render {PLAIN}: {why}")
    system, _ = _first([shown], shows([_message("system", "a rule"), ask], None, "a rule"))
    offering, _ = _first(_variants(shown, "flat_tools"), shows([ask], [TOOL], TOOL_NAME))
    tools, shown = None if offering is None else [TOOL], offering or shown
    variants = _variants(shown, "text_arguments")
    calling, why = _first(variants, shows([ask, _answer(1, 1, text=False), _result(1)], tools, "city1x0", "result1x0"))
    # LFM2 renders results, but its calls are a part of the text.
    resulting, _ = _first(variants, shows([ask, _answer(1, 1), _result(1)], tools, "answer1", "result1x0"))
    shown = calling or resulting or shown

    trials: list[_Trial] = []
    refused: dict[str, str] = {}
    for conversation in conversations(system=system is not None, silent=calling is not None):
        names = shapes(conversation.before, conversation.answer, conversation.new, tools=conversation.tools)
        name = names[-1] if calling else names[0]
        has_calls = any(message.get("tool_calls") for message in [*conversation.before, conversation.answer])
        if has_calls and not (calling or resulting):
            if conversation.answer.get("tool_calls"):
                refused[name] = why
            continue
        show = functools.partial(render, shown)
        try:
            trials.append(_Trial(name, conversation, show, encode, tools, calling is not None, special, stops))
        except (InvalidRequest, NotAnExtension) as error:
            refused.setdefault(name, str(error))
    roles = frozenset(trial.stop for trial in trials if trial.stop not in trial.rest)
    rule = ContinuationRule(encode, decode, Stops(roles.union(stops, (trial.stop for trial in trials)), roles, special))
    wrong, full_history = _wrong(trials, rule, full_history=False), False
    if wrong:
        still_wrong = _wrong(trials, rule, full_history=True)
        full_history = not wrong.keys() <= still_wrong.keys()
        wrong = still_wrong if full_history else wrong
    refused |= wrong
    if PLAIN in refused:
        raise StartupError(f"the chat template cannot be continued after {PLAIN}: {refused[PLAIN]}")
    trims = bool(roles) or any(trial.trims for trial in trials)
    return Findings(shown, tools is not None, rule.stops, full_history, refused, trims)


def _variants(message_format: MessageFormat, name: str) -> list[MessageFormat]:
    return [message_format, msgspec.structs.replace(message_format, **{name: True})]


def _first(
    formats: Sequence[MessageFormat], shows: Callable[[MessageFormat], bool]
) -> tuple[MessageFormat | None, str]:
    """The first format in which it is shown; None and what the first failure was."""
    failures = []
    for message_format in formats:
        try:
            if shows(message_format):
                return message_format, ""
            failures.append("the chat template leaves a part of it out")
        except InvalidRequest as error:
            failures.append(str(error))
    return None, failures[0]


def _wrong(trials: Sequence[_Trial], rule: ContinuationRule, *, full_history: bool) -> dict[str, str]:
    return {trial.name: why for trial in trials if (why := trial.wrong(rule, full_history=full_history))}


class _Trial:
    """One conversation, rendered whole: `rest` follows the stored message if it is the last one, `followed` else.

    `generated`: what of it a policy samples, up to the token that ends its generation.
    """

    def __init__(
        self,
        name: str,
        conversation: Conversation,
        show: Callable[[Tools, Sequence[Message], bool], str],
        encode: Encode,
        tools: Tools,
        shows_calls: bool,
        special: frozenset[int],
        stops: frozenset[int],
    ) -> None:
        self.name = name
        self.conversation = conversation
        self.trims = False
        self._show = show
        self._tools = tools if conversation.tools else None
        stored = [*conversation.before, conversation.answer]
        alone = show(self._tools, stored, False)
        whole = show(self._tools, [*stored, *conversation.new], True)
        word = conversation.answer["content"]
        if shows_calls and (calls := conversation.answer.get("tool_calls")):
            word = calls[-1]["function"]["arguments"]["city"]
        if word not in alone or word not in whole:
            raise NotAnExtension("the chat template leaves a part of the message out")
        rest, followed = alone.rpartition(word)[2], whole.rpartition(word)[2]
        if any(message["content"] not in followed for message in conversation.new):
            raise NotAnExtension("the chat template leaves a message out")
        self.rest, self.followed = encode(rest), encode(followed)
        known = [token for token in self.rest if token in stops]
        ends = known[:1] or [token for token in self.rest if token in special][-1:]
        heading = encode(followed.partition(conversation.new[0]["content"])[0])
        begins = [token for token in heading if token in special][:1]
        if ends:
            self.generated = self.rest[: self.rest.index(ends[0]) + 1]
        elif begins and self.followed[: len(self.rest)] == self.rest:
            self.generated = self.followed[: self.followed.index(begins[0]) + 1]
        else:
            raise NotAnExtension("messages neither end nor begin with a special token")

    @property
    def stop(self) -> int:
        return self.generated[-1]

    def wrong(self, rule: ContinuationRule, *, full_history: bool) -> str | None:
        """Why what the rule gives is not the whole rendering; None if it is."""
        conversation = self.conversation
        before = history(conversation.before, rule.question, full=full_history)

        tools = self._tools if full_history or self._tools is None else [STAND_IN_TOOL]

        def render(answer: Message, new: Sequence[Message], generation_prompt: bool) -> str:
            return self._show(tools, [*before, answer, *new], generation_prompt)

        try:
            leading = history(conversation.before, rule.question, full=False)
            prompt, whole = (
                self._show(self._tools, shown, True)
                for shown in (leading, [*leading, conversation.answer, *conversation.new])
            )
            if prompt.partition(rule.question)[0] != whole.partition(rule.question)[0]:
                raise NotAnExtension("the chat template renders the earlier messages differently")
            extension = rule.extension(render, conversation.answer, conversation.new, self.stop)
        except (InvalidRequest, NotAnExtension) as error:
            return str(error)
        self.trims |= extension.trim > 0
        kept = self.generated[: len(self.generated) - extension.trim]
        if kept != self.followed[: len(kept)]:
            return "the chat template ends the message differently if others follow"
        if kept + extension.ids != self.followed:
            return "the chat template renders what follows depending on what precedes it"
        return None


def history(messages: Sequence[Message], question: str, *, full: bool) -> list[Message]:
    """What the rule renders before the stored message: the leading system messages and a question.

    `full`: all messages without their reasoning, the last one's text replaced by `question`.
    """
    if full and messages:
        bare = [{name: value for name, value in message.items() if name not in REASONING} for message in messages]
        return [*bare[:-1], {**bare[-1], "content": question}]
    leading = itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages)
    return [*leading, _message("user", question)]
