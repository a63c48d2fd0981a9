"""The prompt of a turn as token ids: given by the client, or built from the stored ids and the new messages.

Tokenising runs on its own threads. A template is rendered in Python and shares the GIL with the event loop; a tokenizer
does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from app.domain import decide, prefill
from app.domain.completion import RequestPrompt
from app.domain.history import RequestHistory
from app.domain.images import holds_images
from app.domain.left_out import SILENT_MESSAGE, left_out_at
from app.domain.request import KV_FIELD, KV_MEMBER, ChatRequest, TokenIds, value_of
from app.domain.session import Session, Turn
from app.domain.split import ITEMS
from app.errors import InvalidRequest, TokenPrefixMismatch, Unsupported
from app.sessions.cache import SessionCache, id_text
from app.store.content import load_blobs
from app.tito import normalise
from app.tito.continuation import Extension, NotAnExtension
from app.tito.normalise import EngineDialect
from app.turn.in_flight import Claimed, EngineCall, PromptIds, Request, TemplateInputs, blobs_of
from workers.parse import KnownTokens

if TYPE_CHECKING:
    from app.tito.prompts import Prompts

THREADS = 2
"""More threads would not help: rendering holds the GIL, and encoding uses cores of its own."""

SMALL = 32 << 10
"""Messages up to this size take about 1 ms. They have their own threads, so that they do not wait for long prompts."""

NICENESS = 10
"""Niceness of the tokenizer's threads (Linux only), so that the event loop goes first on a shared core."""

AT_ONCE = 1 << 16
"""How many ids are written as text at once: 6 ms."""

_BUILT_HERE: Mapping[str, tuple[Any, ...]] = {
    prefill.GENERATION_PROMPT: (None, True),
    "chat_template": (None,),
    prefill.CONTINUES: (None, False),
    "documents": (None, []),
}
"""Fields with which a client asks its engine for another prompt, and the values that ask for nothing."""

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TokenIn:
    """Builds prompts as token ids. `prompts` is None in capture mode, where only clients send ids.

    `dialect`: that of the engines, whose rendering the prompts are.
    """

    def __init__(self, cache: SessionCache, prompts: Prompts | None, dialect: Callable[[], EngineDialect]) -> None:
        self._cache = cache
        self.prompts = prompts
        self._dialect = dialect
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer", initializer=_lower_priority)
        self._short_threads = ThreadPoolExecutor(THREADS, "tokenizer-short")

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._short_threads.shutdown(wait=False, cancel_futures=True)

    def template_of(self, request: Request) -> TemplateInputs | None:
        """The template inputs of a chat's prompt; None if it is not rendered here. Raises InvalidRequest."""
        if self.prompts is None or request.ids is not None or not isinstance(request, ChatRequest):
            return None
        if holds_images(request.messages):
            return None  # engines that get ids ignore images: this one renders the prompt
        template = self._template(request.params, request.tools)
        self.prompts.check_arguments(template_arguments(request.params))
        for name, accepted in _BUILT_HERE.items():
            is_begun = request.beginning is not None and name in prefill.PARAMS
            if not is_begun and value_of(request.params.get(name), name) not in accepted:
                raise Unsupported(f"{name} is not supported when the server builds the prompt (TURNLOG_TOKENIZER)")
        transfer = value_of(request.params.get(KV_FIELD), KV_FIELD)
        if isinstance(transfer, dict) and transfer.get(KV_MEMBER) is not None:
            raise Unsupported(f"{KV_FIELD}.{KV_MEMBER}: the server builds the prompt; input_ids holds a client's own")
        return template

    async def count(self, request: ChatRequest) -> int | None:
        """The tokens of a chat's whole prompt; None if it is not rendered here. Raises InvalidRequest, Unsupported."""
        if request.ids is not None:
            return request.ids.count
        template = self.template_of(request)
        if template is None or self.prompts is None:
            return None
        prompts, raws = self.prompts, request.messages

        def counted() -> int:
            messages = [msgspec.json.decode(raw) for raw in raws]
            return len(prompts.first(messages, template.offered, template.arguments, template.dialect))

        return await self._run(sum(len(memoryview(raw)) for raw in raws), counted)

    async def given(self, turn: Claimed, ids: TokenIds) -> PromptIds:
        """The client's own ids. Raises TokenPrefixMismatch if the session rejects drift, and SessionUnreadable."""
        parent = decide.token_parent(turn.session, turn.plan)
        if parent is None or not parent.token_count:
            return PromptIds(ids.text, None)
        history = turn.history
        is_known = isinstance(history, RequestPrompt) and parent.number in history.continued
        if is_known or _begins_with(ids.text, parent):
            return PromptIds(ids.text, _known(parent))
        if turn.session.config.on_drift == "reject":
            at = await self.first_difference(turn, parent, lambda: map(int, ids.text.split(b",")))
            raise TokenPrefixMismatch(
                f"input_ids do not continue the {parent.token_count} stored tokens: they differ at position {at}"
            )
        return PromptIds(ids.text, None)

    async def built(
        self, turn: Claimed, call: EngineCall, template: TemplateInputs, incoming: RequestHistory
    ) -> PromptIds:
        """The ids of a chat's prompt.

        Raises InvalidRequest (refused by the template), TokenPrefixMismatch (the session rejects drift, or the stored
        tokens are not those of the log), and SessionUnreadable.
        """
        assert self.prompts is not None
        parent = decide.token_parent(turn.session, turn.plan)
        if parent is not None and parent.token_count:
            try:
                return await self._extend(turn, call, parent, incoming, template)
            except NotAnExtension as error:
                if turn.session.config.on_drift == "reject":
                    raise TokenPrefixMismatch(
                        f"the prompt cannot continue the {parent.token_count} stored tokens: {error}"
                    ) from error
        messages = await self._all_messages(turn, incoming)
        size = sum(len(memoryview(raw)) for raw in incoming.raws)
        stored = turn.plan.base_messages
        text = await self._run(size, _whole_prompt_text, self.prompts, messages, template, stored)
        return PromptIds(text, None)

    async def begun(self, template: TemplateInputs, prompt: PromptIds, beginning: bytes, dialect: str) -> PromptIds:
        """The prompt with the reply's beginning behind it, as engines of this dialect have it. Raises Unsupported."""
        assert self.prompts is not None
        render = partial(self.prompts.beginning, is_spliced=dialect == "sglang")
        ids = await self._run(len(beginning), render, msgspec.json.decode(beginning)["content"], template.arguments)
        text = b",".join(filter(None, (prompt.text, _long_id_text(ids))))
        return msgspec.structs.replace(prompt, text=text)

    async def silent(self, incoming: RequestHistory, base: int) -> list[str]:
        """The new messages, from `base` on, that the chat template renders as nothing (`app.domain.left_out`)."""
        places = []
        for index in range(base, len(incoming)):
            message = incoming.message(index)
            role = message.get("role")
            if role in ("system", "developer") and message.get("content"):
                assert self.prompts is not None
                if await self._run(0, self.prompts.is_silent, role, index == 0):
                    places.append(left_out_at(SILENT_MESSAGE, f"messages[{index}]"))
        return places

    async def mismatch(
        self, session: Session, leaf: Turn, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The comparator's findings for all tokens and messages up to turn `leaf`.

        Raises InvalidRequest if the template cannot render them, SessionUnreadable.
        """
        assert self.prompts is not None
        template = await self._rendered_with(session, leaf)
        return await self._run(
            SMALL + 1,
            self.prompts.mismatch,
            tokens,
            messages,
            template.offered,
            template.arguments,
            template.dialect,
        )

    async def _rendered_with(self, session: Session, turn: Turn) -> TemplateInputs:
        """The template inputs of the first prompt of the turn's segment. Raises SessionUnreadable."""
        first = session.token_chain(turn.number)[0]
        blobs = await self._blobs(session.session_id, first)
        return self._template(_FIELDS.decode(blobs[first.params]), None if first.tools is None else blobs[first.tools])

    def _template(self, params: Mapping[str, msgspec.Raw], raw_tools: bytes | msgspec.Raw | None) -> TemplateInputs:
        """Raises InvalidRequest."""
        assert self.prompts is not None
        tools = value_of(raw_tools, "tools") or None
        if tools is not None and not isinstance(tools, list):
            raise InvalidRequest("tools must be a list")
        dialect = self._dialect()
        choice, effort, reasoning = (
            value_of(params.get(name), name) for name in ("tool_choice", "reasoning_effort", "reasoning")
        )
        arguments = self.prompts.arguments(template_arguments(params), effort, reasoning, dialect)
        return TemplateInputs(tools, choice, normalise.offered(tools, choice, dialect), arguments, dialect)

    async def _blobs(self, session_id: str, turn: Turn) -> dict[int, bytes]:
        """A turn's parameters and tools by blob number. Raises SessionUnreadable."""
        numbers = {number for number in (turn.params, turn.tools) if number is not None}
        return await self._cache.database.read(lambda c: load_blobs(c, session_id, numbers), session_id=session_id)

    async def first_difference(self, turn: Claimed, parent: Turn, given: Callable[[], Iterable[int]]) -> int:
        """The first position at which the prompt's ids differ from the stored tokens.

        `given` returns the prompt's ids; it runs on a thread. Raises SessionUnreadable.
        """
        stored = await self._cache.tokens(turn.entry, parent.number)

        def compared() -> int:
            pairs = itertools.zip_longest(map(int, stored.split(b",")), given())
            return next(
                (at for at, (stored_id, given_id) in enumerate(pairs) if stored_id != given_id), parent.token_count
            )

        return await asyncio.to_thread(compared)

    async def _extend(
        self,
        turn: Claimed,
        call: EngineCall,
        parent: Turn,
        incoming: RequestHistory,
        template: TemplateInputs,
    ) -> PromptIds:
        """The stored tokens and the new messages' tokens. Raises NotAnExtension, and as `built`."""
        assert self.prompts is not None
        await self._require_same_template(turn.session, call, parent, template)
        stored = await self._cache.tokens(turn.entry, parent.number)
        base = turn.plan.base_messages
        new = [incoming.message(index) for index in range(base, len(incoming))]
        answer = await self._reply(turn, parent)
        raws = incoming.raws[base:]
        if self.prompts.findings.full_history:
            before, raws = (await self._all_messages(turn, incoming))[: base - 1], incoming.raws
        else:
            before = [incoming.message(index) for index in range(_leading_system(incoming))]
        stored_turn = StoredTurn(before, answer, int(stored[stored.rfind(b",") + 1 :]), base)
        size = sum(len(memoryview(raw)) for raw in raws)
        extension, added = await self._run(size, _extension_text, self.prompts, stored_turn, new, template)
        known = _known(parent)
        if extension.trim:
            if extension.trim > parent.output_tokens:
                raise NotAnExtension("the last stored token was not sampled, and the template has another in its place")
            if not _begins_with(stored, parent):
                raise TokenPrefixMismatch(f"the {parent.token_count} stored tokens are not those of the log")
            stored = stored.rsplit(b",", extension.trim)[0]
            text = stored + b","
            known = KnownTokens(parent.token_count - extension.trim, len(text), hashlib.sha256(text).hexdigest())
        return PromptIds(stored + b"," + added if added else stored, known, extension.trim, extends=True)

    async def _require_same_template(
        self, session: Session, call: EngineCall, parent: Turn, template: TemplateInputs
    ) -> None:
        """Require the tools and template arguments that the history began with: both may change its tokens.

        A `tool_choice` of "none" removes no tools from stored tokens. Raises NotAnExtension for other tools,
        InvalidRequest for arguments that would change what is stored.
        """
        assert self.prompts is not None
        first = session.token_chain(parent.number)[0]
        blobs, _ = blobs_of(call, session)
        if (first.params, first.tools) == (blobs.params, blobs.tools):
            return
        before = await self._rendered_with(session, parent)
        kept = template.choice == "none" and template.tools == before.tools
        if not kept and template.offered != before.offered:
            raise NotAnExtension("the tools differ from those that the stored tokens begin with")
        if await self._run(0, self.prompts.rewrites_history, before.arguments, template.arguments, template.offered):
            raise InvalidRequest(
                "chat_template_kwargs would render the stored history differently; use those that it began with"
            )

    async def _all_messages(self, turn: Claimed, incoming: RequestHistory) -> list[Mapping[str, Any]]:
        """All messages, the stored ones in their stored form."""
        new = [incoming.message(index) for index in range(turn.plan.base_messages, len(incoming))]
        if not turn.plan.base_messages:
            return new
        stored = await self._cache.messages(turn.entry, turn.plan.parent)
        return [*msgspec.json.decode(b"[" + stored + b"]"), *new]

    async def _reply(self, turn: Claimed, parent: Turn) -> Mapping[str, Any]:
        """The stored reply of turn `parent`. Raises SessionUnreadable."""
        history = await self._cache.messages(turn.entry, parent.number)
        start = 0
        if parent.history_parent:
            start = len(await self._cache.messages(turn.entry, parent.history_parent)) + 1
        reply: Mapping[str, Any] = msgspec.json.decode(ITEMS.decode(b"[" + history[start:] + b"]")[-1])
        return reply

    async def _run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` on messages of `size` bytes, on a thread."""
        threads = self._short_threads if size <= SMALL else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)


def _whole_prompt_text(
    prompts: Prompts, messages: Sequence[Mapping[str, Any]], template: TemplateInputs, stored: int
) -> bytes:
    """A whole prompt as the text of its ids, the first messages stored ones; runs on a thread."""
    return _long_id_text(prompts.first(messages, template.offered, template.arguments, template.dialect, stored))


class StoredTurn(msgspec.Struct, frozen=True):
    """The reply that a prompt continues: the messages before it, itself, its last id, and how many messages these are.

    `before` is whole only if the template needs it.
    """

    before: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any]
    last: int
    messages: int


def _extension_text(
    prompts: Prompts, stored: StoredTurn, new: Sequence[Mapping[str, Any]], template: TemplateInputs
) -> tuple[Extension, bytes]:
    """The new tokens as `Prompts.after` returns them, and their text; runs on a thread."""
    extension = prompts.after(
        stored.last,
        stored.before,
        stored.answer,
        new,
        template.offered,
        template.arguments,
        stored.messages,
        template.dialect,
    )
    return extension, _long_id_text(extension.ids)


def _leading_system(incoming: RequestHistory) -> int:
    """How many system messages the request begins with."""
    roles = (incoming.message(index).get("role") for index in range(len(incoming)))
    return sum(1 for _ in itertools.takewhile(lambda role: role in ("system", "developer"), roles))


def _long_id_text(ids: array[int]) -> bytes:
    """`id_text` of many ids, some at a time: each call holds the interpreter."""
    return b",".join(id_text(ids[start : start + AT_ONCE].tobytes()) for start in range(0, len(ids), AT_ONCE))


def _lower_priority() -> None:
    """Lower the thread's priority. Only Linux has a niceness per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def added_text(prompt: PromptIds, base: int, output_ids: bytes) -> bytes:
    """The text of a turn's own tokens: what its prompt adds to the `base` known ones, and its output."""
    start = prompt.known.text_bytes if base and prompt.known is not None else 0
    return b",".join(part for part in (prompt.text[start:], id_text(output_ids)) if part)


def _begins_with(text: bytes, parent: Turn) -> bool:
    """Do these ids begin with the tokens after turn `parent`, by the log's hash?"""
    size = parent.tokens_text_bytes
    if len(text) + 1 < size:
        return False
    hasher = hashlib.sha256(memoryview(text)[:size])
    if len(text) + 1 == size:
        hasher.update(b",")
    return hasher.hexdigest() == parent.tokens_hash


def _known(parent: Turn) -> KnownTokens:
    return KnownTokens(parent.token_count, parent.tokens_text_bytes, parent.tokens_hash)


def template_arguments(params: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The request's `chat_template_kwargs`. Raises InvalidRequest."""
    value = value_of(params.get("chat_template_kwargs"), "chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("chat_template_kwargs must be an object")
    return value
