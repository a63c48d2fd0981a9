"""The prompt of a turn as token ids: given by the client, or built here from the stored ids and what is new.

Tokenising runs on threads of its own, so that the event loop answers others meanwhile; a template is rendered by
Python and so shares the interpreter with the loop, a tokenizer does not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from app.domain import decide
from app.domain.history import Incoming
from app.domain.request import ChatRequest, TokenIds
from app.domain.session import Session, Turn
from app.errors import InvalidRequest, SessionUnreadable, TokenPrefixMismatch, Unsupported
from app.service.asking import Outgoing, Prompt, decoded, template_arguments
from app.service.cache import SessionCache, id_text
from app.service.claims import Opening
from app.store import reads
from app.tito import normalise
from app.tito.extension import NotAnExtension
from workers import codec
from workers.codec import CorruptContent, Facts
from workers.parse import Known

if TYPE_CHECKING:
    from app.tito.prompts import Prompts

THREADS = 2
"""More would only wait for each other: rendering holds the interpreter, and encoding uses cores of its own."""

TAIL = 64
"""How many of the last stored ids a junction may look at."""

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TokenIn:
    """`prompts` is None in capture mode: then only clients send ids."""

    def __init__(self, cache: SessionCache, prompts: Prompts | None) -> None:
        self._cache = cache
        self.prompts = prompts
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def given(self, opening: Opening, ids: TokenIds) -> Prompt:
        """The client's own ids; whether they continue the stored ones is for the parent's hash to say."""
        parent = decide.token_parent(opening.session, opening.plan)
        return Prompt(ids.text, None if parent is None else _known(parent))

    async def built(self, opening: Opening, request: ChatRequest, incoming: Incoming, outgoing: Outgoing) -> Prompt:
        """The ids of a chat's prompt.

        Raises InvalidRequest (what the template refuses), TokenPrefixMismatch (a session that rejects drift), and
        SessionUnreadable.
        """
        assert self.prompts is not None
        template = _template(request.params, request.tools)
        self.prompts.check_arguments(template_arguments(request.params))
        if _flag(request.params, "continue_final_message"):
            raise Unsupported("continue_final_message is not possible where the server builds the prompt")
        parent = decide.token_parent(opening.session, opening.plan)
        if parent is not None and parent.token_count:
            try:
                return await self._extended(opening, parent, incoming, outgoing, template)
            except NotAnExtension as error:
                if opening.session.config.on_drift == "reject":
                    raise TokenPrefixMismatch(
                        f"the prompt cannot continue the {parent.token_count} stored tokens: {error}"
                    ) from error
        messages = await self._history(opening, incoming)
        ids = await self._run(self.prompts.first, messages, template.offered, template.arguments)
        return Prompt(id_text(ids.tobytes()), None)

    async def mismatch(
        self, session: Session, leaf: Turn, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The comparator's findings for all tokens and messages after turn `leaf`.

        Raises InvalidRequest where the template cannot render them, SessionUnreadable.
        """
        assert self.prompts is not None
        template = await self._rendered_with(session, leaf)
        return await self._run(self.prompts.mismatch, tokens, messages, template.offered, template.arguments)

    async def _rendered_with(self, session: Session, turn: Turn) -> _Template:
        """What the first prompt of the turn's segment was rendered with. Raises SessionUnreadable."""
        first = session.token_chain(turn.number)[0]
        blobs = await self._blobs(session.session_id, first)
        return _template(_FIELDS.decode(blobs[first.params]), None if first.tools is None else blobs[first.tools])

    async def _blobs(self, session_id: str, turn: Turn) -> dict[int, bytes]:
        """A turn's parameters and tools by their numbers. Raises SessionUnreadable."""
        numbers = {number for number in (turn.params, turn.tools) if number is not None}
        try:
            found = await self._cache.database.read(lambda c: reads.load_blobs(c, session_id, numbers))
        except CorruptContent as error:
            raise SessionUnreadable(f"session {session_id}: {error}") from error
        if len(found) != len(numbers):
            raise SessionUnreadable(f"session {session_id}, turn {turn.number}: its parameters are not there")
        return found

    async def first_difference(self, opening: Opening, parent: Turn, facts: bytes) -> int:
        """The first position at which a prompt that continues nothing differs from the stored tokens.

        `facts` is the frame that its turn would have stored. Raises SessionUnreadable.
        """
        stored = await self._cache.tokens(opening.live, parent.number)

        def compared() -> int:
            given = memoryview(codec.unpack(facts, Facts).suffix_ids).cast("i")
            pairs = zip(map(int, stored.split(b",")), given, strict=False)
            return next((at for at, (one, other) in enumerate(pairs) if one != other), len(given))

        return await asyncio.to_thread(compared)

    async def _extended(
        self, opening: Opening, parent: Turn, incoming: Incoming, outgoing: Outgoing, template: _Template
    ) -> Prompt:
        """The stored tokens and what is new. Raises NotAnExtension, and as `built`."""
        assert self.prompts is not None
        await self._require_same_template(opening.session, parent, outgoing, template)
        stored = await self._cache.tokens(opening.live, parent.number)
        tail = [int(one) for one in stored.rsplit(b",", TAIL)[-TAIL:]]
        base = opening.plan.base_messages
        new = [incoming.message(index) for index in range(base, len(incoming))]
        extension = await self._run(self.prompts.after, tail, new, template.offered, template.arguments, base)
        known = _known(parent)
        if extension.trim:
            stored = stored.rsplit(b",", extension.trim)[0]
            text = stored + b","
            known = Known(parent.token_count - extension.trim, len(text), hashlib.sha256(text).hexdigest())
        added = id_text(extension.ids.tobytes())
        return Prompt(stored + b"," + added if added else stored, known, extension.trim)

    async def _require_same_template(
        self, session: Session, parent: Turn, outgoing: Outgoing, template: _Template
    ) -> None:
        """Tools stand in front of the history, and template arguments may change it: are they those of its beginning?

        A `tool_choice` of "none" takes no tools out of what is stored. Raises NotAnExtension for other tools,
        InvalidRequest for arguments that would rewrite what is stored.
        """
        assert self.prompts is not None
        first = session.token_chain(parent.number)[0]
        if first.params == outgoing.blobs.params and first.tools == outgoing.blobs.tools:
            return
        before = await self._rendered_with(session, parent)
        kept = template.choice == "none" and template.tools == before.tools
        if not kept and template.offered != before.offered:
            raise NotAnExtension("the tools are not those that the stored tokens begin with")
        if before.arguments != template.arguments and await self._run(
            self.prompts.rewrites_history, before.arguments, template.arguments, template.offered
        ):
            raise InvalidRequest(
                "chat_template_kwargs would render the stored history otherwise; use those that it began with"
            )

    async def _history(self, opening: Opening, incoming: Incoming) -> list[Mapping[str, Any]]:
        """All messages: the stored ones as they are stored."""
        new = [incoming.message(index) for index in range(opening.plan.base_messages, len(incoming))]
        if not opening.plan.base_messages:
            return new
        stored = await self._cache.messages(opening.live, opening.plan.parent)
        return [*msgspec.json.decode(b"[" + stored + b"]"), *new]

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def added_text(prompt: Prompt, base: int, output_ids: bytes) -> bytes:
    """The text of a turn's own tokens: those that its prompt adds to the `base` known ones, and its output."""
    start = prompt.known.text_bytes if base and prompt.known is not None else 0
    return b",".join(part for part in (prompt.text[start:], id_text(output_ids)) if part)


def _known(parent: Turn) -> Known:
    return Known(parent.token_count, parent.tokens_text_bytes, parent.tokens_hash)


class _Template(msgspec.Struct, frozen=True):
    """What a request has its template render beside messages: `offered` are those of its `tools` that it shows."""

    tools: Sequence[Any] | None
    choice: Any
    offered: Sequence[Any] | None
    arguments: Mapping[str, Any]


def _template(params: Mapping[str, msgspec.Raw], raw_tools: bytes | msgspec.Raw | None) -> _Template:
    """Raises InvalidRequest."""
    tools = decoded(raw_tools, "tools") or None
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("tools must be a list")
    choice = decoded(params.get("tool_choice"), "tool_choice")
    effort = decoded(params.get("reasoning_effort"), "reasoning_effort")
    arguments = normalise.arguments(template_arguments(params), effort)
    return _Template(tools, choice, normalise.offered(tools, choice), arguments)


def _flag(params: Mapping[str, msgspec.Raw], name: str) -> bool:
    return bool(decoded(params.get(name), name))
