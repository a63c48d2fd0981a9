"""Prompts as token ids: the first in full, later ones as additions to the stored ids. Pure and thread-safe."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from app.errors import InvalidRequest, StartupError, Unsupported
from app.tito import loading, normalise
from app.tito.arguments import arguments as template_arguments
from app.tito.arguments import pinned
from app.tito.battery import Tools, conversations, examine, history, shapes
from app.tito.compare import Comparator
from app.tito.continuation import STAND_IN_TOOL, ContinuationRule, Extension, Message, NotAnExtension
from app.tito.normalise import EngineDialect, MessageFormat
from app.tito.template import Template

RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
        *("padding", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Arguments of `apply_chat_template` itself, as are all that begin with `return_`: not a template's arguments."""

_CACHED_VARIANTS = 64
"""Cached pairs of tools and arguments: one per task in most runs."""

_RULE_PROBE = "turnlog-rule"

_WORD = "turnlog-answer"

_PARTS_PROBE = ("turnlog-part-one", "turnlog-part-two")

_JSON = msgspec.json.Encoder()
_FLIP = msgspec.json.Decoder(tuple[list[Any] | None, dict[str, Any], dict[str, Any]])


class Prompts:
    """One tokenizer with its chat template. `findings`: what the battery found out about it.

    Ids are `array("i")`: int32, as engines count. A later turn costs what its new messages cost.
    """

    def __init__(self, tokenizer: Any, stops: Iterable[int] = (), family: str = "auto") -> None:
        """`stops`: ids that end a generation, beside those that the template shows.

        Raises StartupError if the template cannot be continued.
        """
        self._backend = tokenizer.backend_tokenizer
        self._encoder = Encoder(self._backend)
        self._template = Template(tokenizer)
        self.pinned = pinned(family, self._template.reads())
        added = self._backend.get_added_tokens_decoder().items()
        special = frozenset({token for token, what in added if what.special} | set(tokenizer.all_special_ids))
        lists: list[EngineDialect] = ["sglang"] if self._template.loops_over_content() else []
        parts = [{"type": "text", "text": text} for text in _PARTS_PROBE]
        with contextlib.suppress(InvalidRequest):
            text = self._template.render([{"role": "user", "content": parts}], None, {}, generation_prompt=False)
            if "".join(_PARTS_PROBE) in text:  # the template joins a content list's text parts itself
                lists.append("vllm")
        message_format = MessageFormat(frozenset(lists))
        self.findings = examine(self._probe, self._encode, self.decode, message_format, special, frozenset(stops))
        self._rule = ContinuationRule(self._encode, self.decode, self.findings.stops)
        self._comparator = Comparator(self._opening(), self.findings.stops.ids, special, self.decode)
        self.is_silent = functools.lru_cache(_CACHED_VARIANTS)(self._is_silent)
        self._rewrites = functools.lru_cache(_CACHED_VARIANTS)(self._derive_rewrites)

    @classmethod
    def load(cls, path_or_name: str, family: str = "auto", dialect: EngineDialect | None = None) -> Prompts:
        """Load from a folder, or by a hub's name: local cache first, then the hub. A model's own code is never run.

        `dialect`: that of all engines, where the operator names it. Raises StartupError: no such tokenizer, no fast
        one, one that engines load differently, no chat template, one that engines do not render, or that cannot be
        continued.
        """
        tokenizer, stops = loading.tokenizer(path_or_name, dialect)
        try:
            return cls(tokenizer, stops, family)
        except StartupError as error:
            raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: {error}") from error

    @property
    def max_trim_tokens(self) -> int:
        """How many of the last stored ids an extension may trim: 1 if a message in the middle may end otherwise."""
        return int(self.findings.trims)

    def arguments(
        self, own: Mapping[str, Any], effort: Any, reasoning: Any, dialect: EngineDialect = "sglang"
    ) -> dict[str, Any]:
        """A request's template arguments, by its `chat_template_kwargs`, `reasoning_effort` and `reasoning`.

        Raises InvalidRequest.
        """
        return template_arguments(own, effort, reasoning, self._template.source, dialect)

    def first(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        dialect: EngineDialect = "sglang",
        stored: int = 0,
    ) -> array[int]:
        """A whole prompt with the generation prompt, as an engine of this dialect renders it.

        `stored`: how many of the messages are. Raises InvalidRequest and Unsupported, without content.
        """
        shown = normalise.messages(messages[:stored], self.findings.message_format, dialect, stored=True)
        shown += self._new(messages[stored:], dialect, stored)
        schemas = self._schemas(tools, dialect)
        every = {**arguments, **self.pinned}
        return self._encode(self._template.render(shown, schemas, every, generation_prompt=True))

    def beginning(self, text: str, arguments: Mapping[str, Any], *, is_spliced: bool) -> array[int]:
        """The ids of a reply's beginning, behind a prompt. SGLang splices them in so; vLLM renders a message of the
        assistant and cuts it behind its text, which may be other ids: without `is_spliced`, raises Unsupported then."""
        ids = self._encode(text)
        if is_spliced:
            return ids
        asked, every = [{"role": "user", "content": _WORD}], {**arguments, **self.pinned}
        said = [*asked, {"role": "assistant", "content": text}]
        begun = normalise.messages(said, self.findings.message_format, "vllm")
        prompt = self._template.render(begun[:1], None, every, generation_prompt=True)
        whole = self._template.render(begun, None, every, generation_prompt=False)
        is_alike = text.strip() and whole.startswith(prompt + text)  # White space has no place that vLLM could find.
        if not is_alike or self._encode(prompt + text) != self._encode(prompt) + ids:
            raise Unsupported(
                "continue_final_message: the chat template renders the message differently from a reply that "
                "begins with it"
            )
        return ids

    def after(
        self,
        last: int,
        before: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        first: int = 0,
        dialect: EngineDialect = "sglang",
    ) -> Extension:
        """The tokens for the messages `new`, after stored ids that end with id `last` of the message `answer`.

        `before`: all messages before it if the findings say `full_history`, else at least the leading system messages.
        `first` is the index of the first new message in the request, for errors.

        Raises NotAnExtension for a shape that is refused, and if these messages change how the template renders the
        stored ones.
        """
        message_format = self.findings.message_format
        (stored,) = normalise.messages([answer], message_format, None)
        shown = self._new(new, dialect, first)
        for shape in shapes(before, stored, shown, tools=bool(tools)):
            if (why := self.findings.refused.get(shape)) is not None:
                raise NotAnExtension(f"{shape}: {why}")
        full = self.findings.full_history
        known = normalise.messages(
            history(before, self._rule.question, full=full), message_format, dialect, stored=True
        )
        schemas = self._schemas(tools if full or not tools else [STAND_IN_TOOL], dialect)
        every = {**arguments, **self.pinned}

        def render(answer: Message, new: Sequence[Message], generation_prompt: bool) -> str:
            messages = [*known, *normalise.messages([answer], message_format, None), *new]
            return self._template.render(messages, schemas, every, generation_prompt=generation_prompt)

        return self._rule.extension(render, stored, shown, last)

    def rewrites_history(self, before: Mapping[str, Any], now: Mapping[str, Any], tools: Sequence[Any] | None) -> bool:
        """Do the template arguments `now` render earlier messages differently than `before`?

        Tested on conversations with reasoning, calls, results and a system message, without generation prompt:
        `enable_thinking` of Qwen3 affects only the generation prompt, that of Qwen3.8 the system message. Raises
        InvalidRequest if the template refuses the arguments `now`.
        """
        one, other = {**before, **self.pinned}, {**now, **self.pinned}
        if _key(one) == _key(other):  # 1 and True are equal in Python, but not to a template.
            return False
        return self._rewrites(_key(self._schemas(tools), one, other))

    def check_arguments(self, arguments: object) -> None:
        """Raises InvalidRequest for `chat_template_kwargs` that are not an object, or that clients may not set."""
        if not isinstance(arguments, Mapping):
            raise InvalidRequest("chat_template_kwargs must be an object")
        for name, value in arguments.items():
            if name in RESERVED or name.startswith("return_"):
                raise InvalidRequest(f"chat_template_kwargs.{name} is set by the server")
            if name in self.pinned and (value != self.pinned[name] or type(value) is not type(self.pinned[name])):
                pinned = _JSON.encode(self.pinned[name]).decode()
                raise InvalidRequest(
                    f"chat_template_kwargs.{name} is always {pinned}: another value would change the history"
                )

    def mismatch(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        dialect: EngineDialect = "sglang",
    ) -> list[dict[str, Any]]:
        """Differences between stored ids, which end with a reply, and a rendering of all messages.

        See `compare.Comparator`; O(all tokens). Raises InvalidRequest if the template cannot render them.
        """
        shown = normalise.messages(messages, self.findings.message_format, dialect, stored=True)
        schemas, every = self._schemas(tools, dialect), {**arguments, **self.pinned}
        expected = self._encode(self._template.render(shown, schemas, every, generation_prompt=False))
        return self._comparator.differences(expected, array("i", ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def _new(self, messages: Sequence[Message], dialect: EngineDialect, first: int = 0) -> list[dict[str, Any]]:
        """A client's messages. SGLang makes a question of an assistant's text that comes last."""
        shown = normalise.messages(messages, self.findings.message_format, dialect, first)
        if dialect == "sglang" and shown and shown[-1]["role"] == "assistant" and isinstance(shown[-1]["content"], str):
            shown[-1] = {"role": "user", "content": shown[-1]["content"]}
        return shown

    def _encode(self, text: str) -> array[int]:
        """Special tokens are recognised, but none is added: templates write their own, as engines expect."""
        try:
            if not text.isascii():
                text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("the messages have a lone surrogate, which is not valid text") from error
        return self._encoder.encode(text)

    def _derive_rewrites(self, flip: bytes) -> bool:
        tools, before, now = _FLIP.decode(flip)
        rendered_any = False
        for conversation in conversations():
            messages = normalise.messages(
                [*conversation.before, conversation.answer, *conversation.new], self.findings.message_format, None
            )
            try:
                rendered = self._template.render(messages, tools, before, generation_prompt=False)
            except InvalidRequest:
                continue  # no system messages or no calls in this template
            rendered_any = True
            if rendered != self._template.render(messages, tools, now, generation_prompt=False):
                return True
        return not rendered_any

    def _is_silent(self, role: str, is_first: bool) -> bool:
        """Does the template render a message of this role as nothing: the first one, or one within a conversation?
        False also for a role that the template refuses."""
        asked = {"role": "user", "content": "a question"}
        before = [] if is_first else [asked, {"role": "assistant", "content": "an answer"}]
        probe = [*before, {"role": role, "content": _RULE_PROBE}, asked]
        try:
            text = self._template.render(probe, None, self.pinned, generation_prompt=True)
        except InvalidRequest:
            return False
        return _RULE_PROBE not in text

    def _schemas(self, tools: Sequence[Any] | None, dialect: EngineDialect = "sglang") -> list[dict[str, Any]] | None:
        """Raises Unsupported if the template would leave the tools out."""
        if tools and not self.findings.tools:
            raise Unsupported("tools: the chat template does not render tools")
        return normalise.tools(tools, self.findings.message_format, dialect)

    def _probe(
        self, message_format: MessageFormat, tools: Tools, messages: Sequence[Message], generation_prompt: bool
    ) -> str:
        shown = normalise.messages(messages, message_format, None)
        schemas = normalise.tools(tools, message_format)
        return self._template.render(shown, schemas, self.pinned, generation_prompt=generation_prompt)

    def _opening(self) -> array[int]:
        """The common beginning of a generation prompt and of an assistant message, last or earlier."""
        user, message_format = {"role": "user", "content": "a question"}, self.findings.message_format
        before = self._probe(message_format, None, [user], False)
        texts = [self._probe(message_format, None, [user], True)]
        for following in ([], [user]):
            whole = self._probe(
                message_format, None, [user, {"role": "assistant", "content": _WORD}, *following], False
            )
            texts.append(whole.partition(_WORD)[0])
        encoded = [self._encode(text[len(before) :]) for text in texts]
        alike = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*encoded, strict=False))
        return array("i", (ids[0] for ids in alike))


def _key(*parts: object) -> bytes:
    """JSON that identifies a variant and from which it is decoded again; a surrogate in a tool's schema is not text."""
    try:
        return _JSON.encode(parts)
    except UnicodeEncodeError as error:
        raise InvalidRequest("tools or chat_template_kwargs have a lone surrogate, which is not valid text") from error


PIECE = 256 << 10
"""Characters of a piece, at least: some ten thousand tokens, a few milliseconds of Python."""

STEP = 1 << 16
"""Ids that are converted at once."""


class Encoder:
    """Encodes text as token ids without holding the interpreter for long. `piece` as `PIECE`, for tests.

    A tokenizer releases the interpreter's lock while it encodes, but not while its ids become Python's: a third of a
    second for five million of them, in which no other turn goes on. So long text is encoded in pieces.

    Text is only cut before an added token (`<|im_start|>`), where the result is the same: a tokenizer looks for those
    first, and treats the texts between them separately. A single message is never cut.
    """

    def __init__(self, backend: Any, piece: int = PIECE) -> None:
        self._backend = backend
        self._piece = piece
        # Text may be cut before the added tokens that are found as they stand, take nothing from before them, and share
        # no text with another, which could be found in their place.
        added = backend.get_added_tokens_decoder().values()
        safe = [
            token.content
            for token in added
            if not (token.normalized or token.lstrip or token.single_word)
            and not any(_overlap(other.content, token.content) for other in added if other.content != token.content)
        ]
        self._cut = re.compile("|".join(map(re.escape, safe))) if safe else None

    def encode(self, text: str) -> array[int]:
        """Added tokens are recognised, but none is added."""
        if len(text) <= self._piece:
            return array("i", self._ids(text))
        encoded = array("i")
        for piece in self._pieces(text):
            ids = self._ids(piece)
            for start in range(0, len(ids), STEP):
                encoded.extend(ids[start : start + STEP])
        return encoded

    def _ids(self, text: str) -> list[int]:
        """The batch call computes no offsets: it saves three fifths of the time for short text, a sixth for long."""
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while self._cut is not None and (cut := self._cut.search(text, start + self._piece)) is not None:
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]


def _overlap(other: str, content: str) -> bool:
    """May `other` be found in a text so that it covers a part of `content` there, or begin with it?"""
    if content in other or other in content:
        return True
    shorter = min(len(other), len(content))
    return any(other[-size:] == content[:size] or content[-size:] == other[:size] for size in range(1, shorter))
