"""The prompt of a turn as token ids: given by the client, or built here from the stored ids and what is new.

Tokenising runs on threads of its own, so that the event loop answers others meanwhile; a template is rendered by
Python and so shares the interpreter with the loop, a tokenizer does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from app.domain import decide
from app.domain.history import Incoming
from app.domain.request import ChatRequest, TokenIds, value_of
from app.domain.session import Session, Turn
from app.errors import InvalidRequest, SessionUnreadable, TokenPrefixMismatch, Unsupported
from app.sessions.cache import SessionCache, id_text
from app.store import reads
from app.tito import normalise
from app.tito.extension import NotAnExtension
from app.turn.context import ClaimedTurn, Request, Template
from app.turn.engine_request import EngineRequest, Prompt, template_arguments
from workers.codec import CorruptContent
from workers.parse import Known

if TYPE_CHECKING:
    from app.tito.prompts import Prompts

THREADS = 2
"""More would only wait for each other: rendering holds the interpreter, and encoding uses cores of its own."""

SMALL = 32 << 10
"""Messages of so many bytes take about a millisecond; they have threads of their own, not to wait for long prompts."""

NICENESS = 10
"""Of the tokenizer's threads, on Linux: where they share a core with the event loop, it waits for them no more."""

TAIL = 64
"""How many of the last stored ids a junction may look at."""

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TokenIn:
    """`prompts` is None in capture mode: then only clients send ids."""

    def __init__(self, cache: SessionCache, prompts: Prompts | None) -> None:
        self._cache = cache
        self.prompts = prompts
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer", initializer=_yield_to_others)
        self._brief = ThreadPoolExecutor(THREADS, "tokenizer-brief")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._brief.shutdown(wait=False, cancel_futures=True)

    def template_of(self, request: Request) -> Template | None:
        """What the prompt of a chat will be rendered with; None where none will be. Raises InvalidRequest."""
        if self.prompts is None or request.ids is not None or not isinstance(request, ChatRequest):
            return None
        template = _template(request.params, request.tools)
        self.prompts.check_arguments(template_arguments(request.params))
        if value_of(request.params.get("continue_final_message"), "continue_final_message"):
            raise Unsupported("continue_final_message is not possible where the server builds the prompt")
        return template

    async def given(self, claimed: ClaimedTurn, ids: TokenIds) -> Prompt:
        """The client's own ids. Raises TokenPrefixMismatch where the session rejects drift, and SessionUnreadable."""
        parent = decide.token_parent(claimed.session, claimed.plan)
        if parent is None or not parent.token_count:
            return Prompt(ids.text, None)
        if _begins_with(ids.text, parent):
            return Prompt(ids.text, _known(parent))
        if claimed.session.config.on_drift == "reject":
            at = await self.first_difference(claimed, parent, lambda: map(int, ids.text.split(b",")))
            raise TokenPrefixMismatch(
                f"input_ids do not continue the {parent.token_count} stored tokens: they differ at position {at}"
            )
        return Prompt(ids.text, None)

    async def built(
        self, claimed: ClaimedTurn, template: Template, incoming: Incoming, sending: EngineRequest
    ) -> Prompt:
        """The ids of a chat's prompt.

        Raises InvalidRequest (what the template refuses), TokenPrefixMismatch (a session that rejects drift, stored
        tokens that are not those of the log), and SessionUnreadable.
        """
        assert self.prompts is not None
        parent = decide.token_parent(claimed.session, claimed.plan)
        if parent is not None and parent.token_count:
            try:
                return await self._extended(claimed, parent, incoming, sending, template)
            except NotAnExtension as error:
                if claimed.session.config.on_drift == "reject":
                    raise TokenPrefixMismatch(
                        f"the prompt cannot continue the {parent.token_count} stored tokens: {error}"
                    ) from error
        messages = await self._history(claimed, incoming)
        size = sum(len(memoryview(raw)) for raw in incoming.raws)
        text = await self._run(size, _first_text, self.prompts, messages, template.offered, template.arguments)
        return Prompt(text, None)

    async def mismatch(
        self, session: Session, leaf: Turn, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The comparator's findings for all tokens and messages after turn `leaf`.

        Raises InvalidRequest where the template cannot render them, SessionUnreadable.
        """
        assert self.prompts is not None
        template = await self._rendered_with(session, leaf)
        return await self._run(SMALL + 1, self.prompts.mismatch, tokens, messages, template.offered, template.arguments)

    async def _rendered_with(self, session: Session, turn: Turn) -> Template:
        """What the first prompt of the turn's segment was rendered with. Raises SessionUnreadable."""
        first = session.token_chain(turn.number)[0]
        blobs = await self._blobs(session.session_id, first)
        return _template(_FIELDS.decode(blobs[first.params]), None if first.tools is None else blobs[first.tools])

    async def _blobs(self, session_id: str, turn: Turn) -> dict[int, bytes]:
        """A turn's parameters and tools by their numbers. Raises SessionUnreadable."""
        numbers = {number for number in (turn.params, turn.tools) if number is not None}
        try:
            return await self._cache.database.read(
                lambda c: reads.load_blobs(c, session_id, numbers), session_id=session_id
            )
        except CorruptContent as error:
            raise SessionUnreadable(f"session {session_id}, turn {turn.number}: {error}") from error

    async def first_difference(self, claimed: ClaimedTurn, parent: Turn, given: Callable[[], Iterable[int]]) -> int:
        """The first position at which a prompt that continues nothing differs from the stored tokens.

        `given` makes its ids, on a thread. Raises SessionUnreadable.
        """
        stored = await self._cache.tokens(claimed.entry, parent.number)

        def compared() -> int:
            pairs = zip_longest(map(int, stored.split(b",")), given())
            return next((at for at, (one, other) in enumerate(pairs) if one != other), parent.token_count)

        return await asyncio.to_thread(compared)

    async def _extended(
        self, claimed: ClaimedTurn, parent: Turn, incoming: Incoming, sending: EngineRequest, template: Template
    ) -> Prompt:
        """The stored tokens and what is new. Raises NotAnExtension, and as `built`."""
        assert self.prompts is not None
        await self._require_same_template(claimed.session, parent, sending, template)
        stored = await self._cache.tokens(claimed.entry, parent.number)
        tail = [int(one) for one in stored.rsplit(b",", TAIL)[-TAIL:]]
        base = claimed.plan.base_messages
        new = [incoming.message(index) for index in range(base, len(incoming))]
        size = sum(len(memoryview(raw)) for raw in incoming.raws[base:])
        extension = await self._run(size, self.prompts.after, tail, new, template.offered, template.arguments, base)
        known = _known(parent)
        if extension.trim:
            if extension.trim > parent.output_tokens:
                raise NotAnExtension("the last stored token was not sampled, and the template has another in its place")
            if not _begins_with(stored, parent):
                raise TokenPrefixMismatch(f"the {parent.token_count} stored tokens are not those of the log")
            stored = stored.rsplit(b",", extension.trim)[0]
            text = stored + b","
            known = Known(parent.token_count - extension.trim, len(text), hashlib.sha256(text).hexdigest())
        added = id_text(extension.ids.tobytes())
        return Prompt(stored + b"," + added if added else stored, known, extension.trim, extends=True)

    async def _require_same_template(
        self, session: Session, parent: Turn, sending: EngineRequest, template: Template
    ) -> None:
        """Tools stand in front of the history, and template arguments may change it: are they those of its beginning?

        A `tool_choice` of "none" takes no tools out of what is stored. Raises NotAnExtension for other tools,
        InvalidRequest for arguments that would rewrite what is stored.
        """
        assert self.prompts is not None
        first = session.token_chain(parent.number)[0]
        if first.params == sending.blobs.params and first.tools == sending.blobs.tools:
            return
        before = await self._rendered_with(session, parent)
        kept = template.choice == "none" and template.tools == before.tools
        if not kept and template.offered != before.offered:
            raise NotAnExtension("the tools are not those that the stored tokens begin with")
        if await self._run(0, self.prompts.rewrites_history, before.arguments, template.arguments, template.offered):
            raise InvalidRequest(
                "chat_template_kwargs would render the stored history otherwise; use those that it began with"
            )

    async def _history(self, claimed: ClaimedTurn, incoming: Incoming) -> list[Mapping[str, Any]]:
        """All messages: the stored ones as they are stored."""
        new = [incoming.message(index) for index in range(claimed.plan.base_messages, len(incoming))]
        if not claimed.plan.base_messages:
            return new
        stored = await self._cache.messages(claimed.entry, claimed.plan.parent)
        return [*msgspec.json.decode(b"[" + stored + b"]"), *new]

    async def _run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Work on messages of so many bytes."""
        threads = self._brief if size <= SMALL else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)


def _first_text(
    prompts: Prompts, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, arguments: Mapping[str, Any]
) -> bytes:
    """A whole prompt as the text of its ids, which for a long one is work for a thread as well."""
    return id_text(prompts.first(messages, tools, arguments).tobytes())


def _yield_to_others() -> None:
    """Let the event loop's thread run first; elsewhere than on Linux threads have no niceness of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def added_text(prompt: Prompt, base: int, output_ids: bytes) -> bytes:
    """The text of a turn's own tokens: those that its prompt adds to the `base` known ones, and its output."""
    start = prompt.known.text_bytes if base and prompt.known is not None else 0
    return b",".join(part for part in (prompt.text[start:], id_text(output_ids)) if part)


def _begins_with(text: bytes, parent: Turn) -> bool:
    """Are the first of these ids the tokens after turn `parent`, by the log's hash?"""
    size = parent.tokens_text_bytes
    if len(text) + 1 < size:
        return False
    hasher = hashlib.sha256(memoryview(text)[:size])
    if len(text) + 1 == size:
        hasher.update(b",")
    return hasher.hexdigest() == parent.tokens_hash


def _known(parent: Turn) -> Known:
    return Known(parent.token_count, parent.tokens_text_bytes, parent.tokens_hash)


def _template(params: Mapping[str, msgspec.Raw], raw_tools: bytes | msgspec.Raw | None) -> Template:
    """Raises InvalidRequest."""
    tools = value_of(raw_tools, "tools") or None
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("tools must be a list")
    choice = value_of(params.get("tool_choice"), "tool_choice")
    effort = value_of(params.get("reasoning_effort"), "reasoning_effort")
    arguments = normalise.arguments(template_arguments(params), effort)
    return Template(tools, choice, normalise.offered(tools, choice), arguments)
