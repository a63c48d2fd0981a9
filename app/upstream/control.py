"""Commands to engines: pause, continue, abort a generation.

    command                 SGLang                          vLLM (its development mode)
    pause, mode abort       POST /pause_generation abort    POST /pause?mode=abort
      in_place, retract       with the same mode              keep
    continue                POST /continue_generation       POST /resume
    abort generations       POST /abort_request by rid      POST /abort_requests by request ids,
                              each alone                      or /inference/v1/abort_requests (scale-out)

vLLM makes a request's id of the route's name and the header `X-Request-Id`. If the dialect is unknown, SGLang's route
is tried and, if it is missing, vLLM's. A router has no route to abort a generation: its workers are told, as
`GET /workers` names them (SGLang's gateway, docs.sglang.io/advanced_features/router.html).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec

from app.domain.fleet import PauseMode
from app.upstream.client import EngineClient
from app.upstream.dialects import DialectChoice
from app.upstream.headers import to_control
from app.upstream.http import EngineError, Lost
from app.upstream.streams import UNREADABLE

Dialect = Literal["sglang", "vllm"]

ABORT_S, RESUME_S = 5.0, 5.0
PAUSE_S = 30.0
"""SGLang answers when nothing runs any more, which it checks once a second."""

AT_ONCE = 16
"""Concurrent commands to one engine."""

_ABORT_VLLM = ("/abort_requests", "/inference/v1/abort_requests")
"""The first is the development mode's, the other a scale-out deployment's."""

_PAUSE_VLLM = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class _NoRoute(Exception):
    """The engine cannot abort one generation; the message says why."""


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    """What a router answers to `GET /workers`."""

    workers: list[_Worker]


class EngineControl:
    """`dialect` is the operator's setting for all engines; `known`, below, the dialect observed of one.

    Commands are idempotent, so one is repeated if its connection was lost. Methods return None, or why the engine did
    not obey.
    """

    def __init__(self, client: EngineClient, dialect: DialectChoice, api_key: str | None) -> None:
        self._client = client
        self._dialect = dialect
        self._headers = to_control(api_key)

    async def pause(self, url: str, mode: PauseMode, known: Dialect | None = None) -> str | None:
        """Hold all generations, new ones too; `abort` ends running ones."""
        sglang = ("/pause_generation", {"mode": mode})
        return await self._in_dialect(url, sglang, f"/pause?mode={_PAUSE_VLLM[mode]}", known, PAUSE_S)

    async def resume(self, url: str, known: Dialect | None = None) -> str | None:
        """Continue all generations; no effect on an engine that is not paused."""
        return await self._in_dialect(url, ("/continue_generation", {}), "/resume", known, RESUME_S)

    async def abort(self, url: str, rids: Sequence[str], known: Dialect | None = None) -> dict[str, str | None]:
        """Abort these generations; unknown ones are ignored. A router's workers are all told, since only one of them
        has the generation."""
        if not rids:
            return {}  # vLLM would take an empty list for all of its requests.
        try:
            return await self._abort(url, rids, known)
        except _NoRoute as error:
            why = str(error)
        told = await asyncio.gather(*(self._abort_at(worker, rids, known) for worker in await self._workers(url)))
        if not told:
            return dict.fromkeys(rids, why)
        return {
            rid: next((f"worker {name}: {errors[rid]}" for name, errors in told if errors[rid]), None) for rid in rids
        }

    async def _abort(self, url: str, rids: Sequence[str], known: Dialect | None) -> dict[str, str | None]:
        """The error of each, if any. Raises _NoRoute."""
        dialect = known if self._dialect == "auto" else self._dialect
        if dialect == "vllm":
            return dict.fromkeys(rids, await self._abort_vllm(url, rids))
        statuses = await self._abort_sglang(url, rids)
        if all(status == 404 for status, _ in statuses):
            if dialect is not None:
                raise _NoRoute("it has no /abort_request")
            return dict.fromkeys(rids, await self._abort_vllm(url, rids))
        return dict(zip(rids, (error for _, error in statuses), strict=True))

    async def _abort_at(
        self, worker: str, rids: Sequence[str], known: Dialect | None
    ) -> tuple[str, dict[str, str | None]]:
        """A worker and the errors that it answers."""
        try:
            return worker, await self._abort(worker, rids, known)
        except _NoRoute as error:
            return worker, dict.fromkeys(rids, str(error))

    async def _workers(self, url: str) -> list[str]:
        """The URLs of a router's workers; none if it is no router, or does not answer."""
        try:
            async with asyncio.timeout(ABORT_S):
                reply = await self._client.get(url + "/workers", self._headers)
            listing = msgspec.json.decode(reply.body.joined(), type=_Workers) if reply.status == 200 else _Workers([])
        except (EngineError, TimeoutError, *UNREADABLE):
            return []
        return [worker.url.rstrip("/") for worker in listing.workers if worker.url.startswith(("http://", "https://"))]

    async def _abort_sglang(self, url: str, rids: Sequence[str]) -> list[tuple[int | None, str | None]]:
        """Status and error for each. If one gets no answer, the remaining ones are not sent: each would wait as
        long."""
        slots = asyncio.Semaphore(AT_ONCE)
        no_answer: str | None = None

        async def abort(rid: str) -> tuple[int | None, str | None]:
            nonlocal no_answer
            async with slots:
                if no_answer is not None:
                    return None, no_answer
                status, error = await self._post(url, "/abort_request", {"rid": rid, "abort_all": False}, ABORT_S)
                no_answer = error if status is None else no_answer
            return status, error

        return await asyncio.gather(*map(abort, rids))

    async def _abort_vllm(self, url: str, rids: Sequence[str]) -> str | None:
        """The error, if any, which is the same for all: they are one request. Raises _NoRoute."""
        body = {"request_ids": [request_id for rid in rids for request_id in vllm_request_ids(rid)]}
        refused: list[str] = []
        for path in _ABORT_VLLM:
            status, error = await self._post(url, path, body, ABORT_S)
            if status not in (403, 404, 405):
                return error
            refused.append(f"{path} answers {status}")
        raise _NoRoute(f"it aborts no single generation ({', '.join(refused)}); vLLM does with VLLM_SERVER_DEV_MODE=1")

    async def _in_dialect(
        self, url: str, sglang: tuple[str, object], vllm: str, known: Dialect | None, within_s: float
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


def vllm_request_ids(rid: str) -> tuple[str, str]:
    """vLLM's ids of a chat and of a completion that were sent with this `X-Request-Id`; only one of them is there."""
    return f"chatcmpl-{rid}", f"cmpl-{rid}-0"
