"""What Turnlog orders of engines: to pause, to go on, to end a generation.

    order                   SGLang                          vLLM (its development mode)
    pause, mode abort       POST /pause_generation abort    POST /pause?mode=abort
      in_place, retract       with the same mode              keep
    go on                   POST /continue_generation       POST /resume
    end a generation        POST /abort_request by rid      has no such route

Where the dialect is not known, SGLang's route is tried and, if there is none, vLLM's.
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
"""SGLang says that it has paused when nothing runs any more, for which it looks once a second."""

AT_ONCE = 16
"""Orders to one engine at a time."""

_PAUSE_VLLM = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class EngineControl:
    """`dialect`: what the operator says that all engines speak; `known`, below, what one was seen to speak.

    Orders can be given twice, so one whose connection broke is. What comes back is None, or why the engine did not take
    the order.
    """

    def __init__(self, client: EngineClient, dialect: DialectChoice, api_key: str | None) -> None:
        self._client = client
        self._dialect = dialect
        self._headers = to_control(api_key)

    async def pause(self, url: str, mode: PauseMode, known: Literal["sglang", "vllm"] | None = None) -> str | None:
        """Hold all generations, new ones too; `abort` ends those that run."""
        sglang = ("/pause_generation", {"mode": mode})
        return await self._either(url, sglang, f"/pause?mode={_PAUSE_VLLM[mode]}", known, PAUSE_S)

    async def resume(self, url: str, known: Literal["sglang", "vllm"] | None = None) -> str | None:
        """Let them go on; nothing to an engine that is not paused."""
        return await self._either(url, ("/continue_generation", {}), "/resume", known, RESUME_S)

    async def abort(self, url: str, rids: Sequence[str]) -> dict[str, str | None]:
        """End these generations; one that the engine does not have is nothing to it.

        Where one order gets no answer, those that wait behind it are not sent: each would wait as long.
        """
        if self._dialect == "vllm":
            return dict.fromkeys(rids, "vLLM has no route that ends one generation")
        slots = asyncio.Semaphore(AT_ONCE)
        silence: str | None = None

        async def one(rid: str) -> str | None:
            nonlocal silence
            async with slots:
                if silence is not None:
                    return silence
                status, error = await self._post(url, "/abort_request", {"rid": rid, "abort_all": False}, ABORT_S)
                silence = error if status is None else silence
            return "it has no /abort_request" if status == 404 else error

        return dict(zip(rids, await asyncio.gather(*map(one, rids)), strict=True))

    async def _either(
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
        self, url: str, path: str, body: object, within_s: float, *, again: bool = True
    ) -> tuple[int | None, str | None]:
        """The status, if there was an answer, and what is wrong with it."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(within_s):
                reply = await self._client.post(url + path, data, self._headers)
        except Lost as error:
            if again:
                return await self._post(url, path, body, within_s, again=False)
            return None, f"{path}: {error}"
        except EngineError as error:
            return None, f"{path}: {error}"
        except TimeoutError:
            return None, f"{path}: no answer within {within_s:g} s"
        return reply.status, None if reply.status == 200 else f"{path}: it answered {reply.status}"
