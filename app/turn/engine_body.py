"""A turn's request as the engine that gets it can read it: engines differ in how a chat takes a prompt's ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from app.domain.request import CompletionRequest, value_of
from app.errors import Unsupported
from app.fleet.engines import PATHS
from app.turn.context import TurnContext
from app.turn.engine_request import EngineRequest, EngineRequestOptions, PromptIds
from app.upstream.generate import GENERATE, Fields, generate_body
from app.upstream.http import EngineError

if TYPE_CHECKING:
    from app.services import Services

IdsOrigin = Literal["built", "client", "continued"]
"""Where a chat's ids come from, which decides what becomes of them at an engine that takes none.

    built       from the messages: the engine renders these instead, and the turn is captured
    client      the client's own: 400 `unsupported`
    continued   of a generation that was aborted: it cannot go on (TakesNoIds)
"""


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TakesNoIds(EngineError):
    """The generation cannot be continued at this engine."""


class EngineBody:
    """One request. `options` and `prompt` are as the engine that was asked last got them: `prompt` is None if that
    engine takes no ids, and `is_native` if it got a request of `/generate`, which `wants_native` asks for."""

    def __init__(
        self,
        services: Services,
        context: TurnContext,
        request: EngineRequest,
        options: EngineRequestOptions,
        messages: Sequence[bytes | memoryview],
        prompt: PromptIds | None,
        origin: IdsOrigin,
        *,
        wants_native: bool = False,
    ) -> None:
        self.options = options
        self.is_native = False
        self._wants_native = wants_native
        self.prompt = prompt
        self._services = services
        self._context = context
        self._request = request
        self._messages = messages
        self._ids = prompt
        self._origin = origin

    def change(self, options: EngineRequestOptions) -> None:
        """Ask with other options."""
        self.options = options

    async def __call__(self, engine: str) -> Sequence[bytes | memoryview]:
        """The body for this engine, in parts. Raises as `Engines.ids_field`, TakesNoIds, Unsupported."""
        context, request = self._context, self._request
        if self._wants_native:
            if body := await self._native(engine):
                return [body]
            self.options = msgspec.structs.replace(self.options, own=b"")
        if self._ids is not None and request.shape == "chat":
            field = await self._services.engines.ids_field(engine, context.request.params.get("model"))
            if field is None:
                self._require_replaceable(engine)
            self.options = msgspec.structs.replace(self.options, ids_field=field)
            self.prompt = self._ids if field is not None else None
        text = context.request.text if isinstance(context.request, CompletionRequest) else None
        return await self._services.large_bodies.run(
            context.large, lambda: request.body(self.options, self._messages, text, self.prompt)
        )

    @property
    def path(self) -> str:
        """The route of the body that was made last."""
        return GENERATE if self.is_native else PATHS[self._request.shape]

    async def _native(self, engine: str) -> bytes | None:
        """The request of `/generate`; None if this engine would not answer it as its chat. Raises EngineError,
        TakesNoIds."""
        params: Fields = _FIELDS.decode(self._request.params)
        info = await self._services.native.info(engine)
        self.is_native = self._ids is not None and info.takes(params)
        if self._ids is None or not self.is_native:
            if self._origin == "continued":
                raise TakesNoIds(engine)
            return None
        offers = self._request.tools is not None and value_of(params.get("tool_choice"), "tool_choice") != "none"
        self.prompt = self._ids
        return generate_body(params, self._ids.text, self.options.rid, offers_tools=offers)

    def _require_replaceable(self, engine: str) -> None:
        """May the engine render the messages instead? Raises TakesNoIds, Unsupported."""
        if self._origin == "continued":
            raise TakesNoIds(engine)
        if self._origin == "client":
            raise Unsupported(f"input_ids: the chat of {engine} takes no token ids; /v1/completions does")
