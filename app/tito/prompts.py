"""Prompts as token ids: the first in full, later ones as additions to the stored ids. Pure and thread-safe."""

from __future__ import annotations

import functools
import importlib
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from app.errors import InvalidRequest, StartupError
from app.extras import install
from app.tito import normalise
from app.tito.compare import Comparator
from app.tito.encoding import Encoder
from app.tito.extension import Extension, NotAnExtension
from app.tito.families import Family
from app.tito.families import family as family_of
from app.tito.junction import Junction, JunctionRenderer, digest
from app.tito.template import Message, Template

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of `apply_chat_template` itself, as are all that begin with `return_`: not a template's arguments."""

_CACHED_BYTES = 64 << 10
"""Tools and arguments larger than this are not cached."""

_CACHED_VARIANTS = 64
"""Cached pairs of tools and arguments: one per task in most runs."""

_RULE_PROBE = "turnlog-rule"

_PARTS_PROBE = ("turnlog-part-one", "turnlog-part-two")

_PROBES: tuple[tuple[Message, ...], ...] = tuple(
    (*opening, *middle, *ending)
    for opening in ([], [{"role": "system", "content": "a rule"}])
    for middle in (
        [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": "an answer", "reasoning_content": "a thought"},
        ],
        [
            {"role": "user", "content": "a question"},
            {
                "role": "assistant",
                "content": "a remark",
                "reasoning_content": "a thought",
                "tool_calls": [
                    {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
                ],
            },
            {"role": "tool", "content": "a result", "tool_call_id": "call_0"},
            {"role": "assistant", "content": "an answer", "reasoning_content": "another thought"},
        ],
    )
    for ending in ([], [{"role": "user", "content": "thanks"}])
)
"""Conversations that reveal whether template arguments change the history."""

_JSON = msgspec.json.Encoder()
_VARIANT = msgspec.json.Decoder(tuple[list[Any] | None, dict[str, Any]])
_FLIP = msgspec.json.Decoder(tuple[list[Any] | None, dict[str, Any], dict[str, Any]])


class Prompts:
    """One tokenizer with its chat template and the derived junction.

    Ids are `array("i")`: int32, as engines count. The cost depends on the size of the new messages and the tools.
    """

    def __init__(self, tokenizer: Any, row: Family) -> None:
        """Raises StartupError if the template's junction cannot be derived, or is not the family's."""
        self._backend = tokenizer.backend_tokenizer
        self._encoder = Encoder(self._backend)
        self._template = Template(tokenizer)
        reads = self._template.reads()
        self._pinned = {name: value for name, value in row.pinned.items() if name in reads}
        added = self._backend.get_added_tokens_decoder()
        self._renderer = JunctionRenderer(self._template)
        self._junction = self._renderer.derive(self._encode, frozenset(added), self._pinned)
        _check_family(row, self._junction, self.decode)
        self._separator = "" if self._joins_parts() else " "
        self._flat_tools = self._needs_flat_tools()
        special = {token for token, what in added.items() if what.special} | set(tokenizer.all_special_ids)
        self._comparator = Comparator(self._junction, frozenset(special), self.decode)
        self._heads = functools.lru_cache(_CACHED_VARIANTS)(self._derive_heads)
        self._silent = functools.lru_cache(_CACHED_VARIANTS)(self._derive_silent)
        self._rewrites = functools.lru_cache(_CACHED_VARIANTS)(self._derive_rewrites)

    @classmethod
    def load(cls, path_or_name: str, family: str) -> Prompts:
        """Load from a folder, or by a hub's name: local cache first, then the hub. A model's own code is never run.

        Raises StartupError: no such tokenizer, no fast one, no chat template, no junction, an unknown family.
        """
        row = family_of(family)
        # With one text per call there is nothing to parallelise, and the package's threads would not have the caller's
        # niceness.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = _tokenizer(_transformers(), path_or_name)
        if not tokenizer.is_fast:
            raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: not a fast tokenizer (one with a tokenizer.json)")
        if not tokenizer.chat_template:
            raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: the tokenizer has no chat template")
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        try:
            return cls(tokenizer, row)
        except StartupError as error:
            raise StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: {error}") from error

    @property
    def max_trim_tokens(self) -> int:
        """How many of the last stored ids an extension may trim: 1 if a generation ends with a role token."""
        return self._junction.max_trim_tokens

    def first(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, arguments: Mapping[str, Any]
    ) -> array[int]:
        """A whole prompt with the generation prompt. Raises InvalidRequest and Unsupported, without content."""
        return self._encode(self._render(messages, tools, arguments, generation_prompt=True))

    def after(
        self,
        tail: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        first: int = 0,
    ) -> Extension:
        """The tokens for the new `messages`, after stored ids that end with `tail`.

        `first` is the index of the first message in the request, for errors.

        Raises NotAnExtension if these messages change how the template renders the stored ones.
        """
        shown = normalise.messages(messages, self._separator, first)
        schemas = normalise.tools(tools, flat=self._flat_tools)
        every = {**arguments, **self._pinned}
        head, text = self._renderer.render_new(self._junction.text, shown, schemas, every)
        variant = _key(schemas, every)
        if digest(head) not in self._known_heads(variant):
            self._heads.cache_clear()  # A template that writes the date has other heads after midnight.
            if digest(head) not in self._known_heads(variant):
                raise NotAnExtension("the chat template renders the messages before these otherwise")
        return self._junction.join(tail, self._encode(text))

    def rewrites_history(self, before: Mapping[str, Any], now: Mapping[str, Any], tools: Sequence[Any] | None) -> bool:
        """Do the template arguments `now` render earlier messages differently than `before`?

        Tested on conversations with reasoning, calls, results and a system message, without generation prompt:
        `enable_thinking` of Qwen3 affects only the generation prompt, that of Qwen3.8 the system message. Raises
        InvalidRequest if the template refuses the arguments `now`.
        """
        one, other = {**before, **self._pinned}, {**now, **self._pinned}
        if _key(one) == _key(other):  # 1 and True are equal in Python, but not to a template.
            return False
        return self._rewrites(_key(normalise.tools(tools, flat=self._flat_tools), one, other))

    def is_silent(self, role: str, is_first: bool) -> bool:
        """Does the template render a message of this role as nothing: the first one, or one within a conversation?"""
        return self._silent(role, is_first)

    def check_arguments(self, arguments: object) -> None:
        """Raises InvalidRequest for `chat_template_kwargs` that are not an object, or that clients may not set."""
        if not isinstance(arguments, Mapping):
            raise InvalidRequest("chat_template_kwargs must be an object")
        for name, value in arguments.items():
            if name in RESERVED or name.startswith("return_"):
                raise InvalidRequest(f"chat_template_kwargs.{name} is set by the server")
            if name in self._pinned and (value != self._pinned[name] or type(value) is not type(self._pinned[name])):
                pinned = _JSON.encode(self._pinned[name]).decode()
                raise InvalidRequest(f"chat_template_kwargs.{name} is always {pinned}: otherwise history would change")

    def mismatch(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Differences between stored ids, which end with a reply, and a rendering of all messages.

        See `compare.Comparator`; O(all tokens). Raises InvalidRequest if the template cannot render them.
        """
        expected = self._encode(self._render(messages, tools, arguments, generation_prompt=False))
        return self._comparator.differences(expected, array("i", ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        *,
        generation_prompt: bool,
    ) -> str:
        shown = normalise.messages(messages, self._separator)
        schemas = normalise.tools(tools, flat=self._flat_tools)
        every = {**arguments, **self._pinned}
        return self._template.render(shown, schemas, every, generation_prompt=generation_prompt)

    def _encode(self, text: str) -> array[int]:
        """Special tokens are recognised, but none is added: templates write their own, as engines expect."""
        if not text.isascii():
            _check_text(text)
        return self._encoder.encode(text)

    def _known_heads(self, variant: bytes) -> frozenset[bytes]:
        return (self._heads if len(variant) <= _CACHED_BYTES else self._derive_heads)(variant)

    def _derive_heads(self, variant: bytes) -> frozenset[bytes]:
        return self._renderer.heads(*_VARIANT.decode(variant))

    def _derive_rewrites(self, flip: bytes) -> bool:
        tools, before, now = _FLIP.decode(flip)
        rendered_any = False
        for probe in _PROBES:
            try:
                rendered = self._template.render(probe, tools, before, generation_prompt=False)
            except InvalidRequest:
                continue  # no system messages or no calls in this template
            rendered_any = True
            if rendered != self._template.render(probe, tools, now, generation_prompt=False):
                return True
        return not rendered_any

    def _derive_silent(self, role: str, is_first: bool) -> bool:
        """False also for a role that the template refuses."""
        asked = {"role": "user", "content": "a question"}
        before = [] if is_first else [asked, {"role": "assistant", "content": "an answer"}]
        probe = [*before, {"role": role, "content": _RULE_PROBE}, asked]
        try:
            text = self._template.render(probe, None, self._pinned, generation_prompt=True)
        except InvalidRequest:
            return False
        return _RULE_PROBE not in text

    def _joins_parts(self) -> bool:
        """Does the template join a content list's text parts itself? If not, SGLang joins them with a space."""
        parts = [{"type": "text", "text": text} for text in _PARTS_PROBE]
        try:
            text = self._template.render([{"role": "user", "content": parts}], None, {}, generation_prompt=False)
        except InvalidRequest:
            return False
        return "".join(_PARTS_PROBE) in text

    def _needs_flat_tools(self) -> bool:
        """Does the template fail on `{"type", "function"}` but accept the function alone? SGLang then sends that."""
        tool = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {}}}
        for flat in (False, True):
            try:
                schemas = normalise.tools([tool], flat=flat)
                self._template.render(
                    [{"role": "user", "content": "a"}], schemas, self._pinned, generation_prompt=False
                )
            except InvalidRequest:
                continue
            return flat
        return False


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the messages hold a lone surrogate, which is no text") from error


def _key(*parts: object) -> bytes:
    """JSON that identifies a variant and from which it is decoded again; a surrogate in a tool's schema is not text."""
    try:
        return _JSON.encode(parts)
    except UnicodeEncodeError as error:
        raise InvalidRequest("tools or chat_template_kwargs hold a lone surrogate, which is no text") from error


def _check_family(row: Family, junction: Junction, decode: Any) -> None:
    if row.ends_with is not None and row.ends_with != junction.text:
        raise StartupError(
            f"the chat template is not that of TURNLOG_TITO_FAMILY={row.name!r}: its messages end otherwise"
        )
    stops = tuple(sorted(decode([token]) for token in junction.stops))
    if row.stops is not None and row.stops != stops:
        raise StartupError(f"the chat template is not that of TURNLOG_TITO_FAMILY={row.name!r}: its role tokens differ")


def _transformers() -> ModuleType:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Otherwise it warns that PyTorch is missing.
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise StartupError(f"TURNLOG_TOKENIZER needs the package transformers: {install('tito')}") from error


def _tokenizer(transformers: ModuleType, path_or_name: str) -> Any:
    load = transformers.AutoTokenizer.from_pretrained
    try:
        return load(path_or_name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if Path(path_or_name).exists():
            raise _not_loaded(path_or_name, error) from error
    try:
        return load(path_or_name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(path_or_name, error) from error


def _not_loaded(path_or_name: str, error: Exception) -> StartupError:
    return StartupError(f"TURNLOG_TOKENIZER={path_or_name!r}: no tokenizer can be loaded ({type(error).__name__})")
