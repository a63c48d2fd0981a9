"""Commands to engines: pause, continue, abort a generation.

    command                 SGLang                          vLLM (its development mode)
    pause, mode abort       POST /pause_generation abort    POST /pause?mode=abort
      in_place, retract       with the same mode              keep
    continue                POST /continue_generation       POST /resume
    abort a generation      POST /abort_request by rid      has no such route

If the dialect is unknown, SGLang's route is tried and, if it is missing, vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec

from app.domain.fleet import PauseMode
from app.upstream.client import EngineClient, EngineError, Lost
from app.upstream.dialects import DialectChoice
from app.upstream.headers import to_control

ABORT_S, RESUME_S = 5.0, 5.0
PAUSE_S = 30.0
"""SGLang answers when nothing runs any more, which it checks once a second."""

AT_ONCE = 16
"""Concurrent commands to one engine."""

_PAUSE_VLLM = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class EngineControl:
    """`dialect` is the operator's setting for all engines; `known`, below, the dialect observed of one.

    Commands are idempotent, so one is repeated if its connection was lost. Methods return None, or why the engine did
    not obey.
    """

    def __init__(self, client: EngineClient, dialect: DialectChoice, api_key: str | None) -> None:
        self._client = client
        self._dialect = dialect
        self._headers = to_control(api_key)

    async def pause(self, url: str, mode: PauseMode, known: Literal["sglang", "vllm"] | None = None) -> str | None:
        """Hold all generations, new ones too; `abort` ends running ones."""
        sglang = ("/pause_generation", {"mode": mode})
        return await self._in_dialect(url, sglang, f"/pause?mode={_PAUSE_VLLM[mode]}", known, PAUSE_S)

    async def resume(self, url: str, known: Literal["sglang", "vllm"] | None = None) -> str | None:
        """Continue all generations; no effect on an engine that is not paused."""
        return await self._in_dialect(url, ("/continue_generation", {}), "/resume", known, RESUME_S)

    async def abort(self, url: str, rids: Sequence[str]) -> dict[str, str | None]:
        """Abort these generations; unknown ones are ignored.

        If one request gets no answer, the remaining ones are not sent: each would wait as long.
        """
        if self._dialect == "vllm":
            return dict.fromkeys(rids, "vLLM has no route that ends one generation")
        slots = asyncio.Semaphore(AT_ONCE)
        no_answer: str | None = None

        async def one(rid: str) -> str | None:
            nonlocal no_answer
            async with slots:
                if no_answer is not None:
                    return no_answer
                status, error = await self._post(url, "/abort_request", {"rid": rid, "abort_all": False}, ABORT_S)
                no_answer = error if status is None else no_answer
            return "it has no /abort_request" if status == 404 else error

        return dict(zip(rids, await asyncio.gather(*map(one, rids)), strict=True))

    async def _in_dialect(
        self, url: str, sglang: tuple[str, object], vllm: str, known: Literal["sglang", "vllm"] | None, within_s: float
    ) -> str | None:
        dialect = known if self._dialect == "auto" else self._dialect
        if dialect != "vllm":
            status, error = await self._post(url, *sglang, within_s)
            if status != 404 or dialect is not None:
                return error
        status, error = await self._post(url, vllm, None, within_s)
        return "it has no route for this" if status == 404 and dialect is None else error

    async def _post(
        self, url: str, path: str, body: object, within_s: float, *, may_retry: bool = True
    ) -> tuple[int | None, str | None]:
        """The status, if there was an answer, and the error, if any."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(within_s):
                reply = await self._client.post(url + path, data, self._headers)
        except Lost as error:
            if may_retry:
                return await self._post(url, path, body, within_s, may_retry=False)
            return None, f"{path}: {error}"
        except EngineError as error:
            return None, f"{path}: {error}"
        except TimeoutError:
            return None, f"{path}: no answer within {within_s:g} s"
        return reply.status, None if reply.status == 200 else f"{path}: it answered {reply.status}"
