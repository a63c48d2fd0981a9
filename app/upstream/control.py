"""Commands to engines: pause, continue, abort a generation.

    command                 SGLang                          vLLM (its development mode)
    pause, mode abort       POST /pause_generation abort    POST /pause?mode=abort
      in_place, retract       with the same mode              keep
    continue                POST /continue_generation       POST /resume
    abort generations       POST /abort_request by rid      POST /abort_requests by request ids,
                              each alone                      or /inference/v1/abort_requests (scale-out)

vLLM makes a request's id of the route's name and the header `X-Request-Id`. If the dialect is unknown, SGLang's route
is tried and, if it is missing, vLLM's. A router has no route to abort a generation: its workers are told, as
`GET /workers` names them (SGLang's gateway, docs.sglang.io/advanced_features/router.html). Whoever may add workers to
a router says what is in that list: the engines' key goes only to those that the operator names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from app.domain.fleet import PauseMode
from app.domain.patterns import AddressPattern, base_url_fault, plain_base_url
from app.upstream.client import EngineClient
from app.upstream.dialects import DialectChoice
from app.upstream.headers import Headers, to_control
from app.upstream.http import EngineError, Lost
from app.upstream.streams import UNREADABLE

Dialect = Literal["sglang", "vllm"]

ABORT_S, RESUME_S = 5.0, 5.0
PAUSE_S = 30.0
"""SGLang answers when nothing runs any more, which it checks once a second."""

AT_ONCE = 16
"""Concurrent commands to one engine."""

MOST_WORKERS = 1000
"""Of one router; all are told at once."""

_ABORT_VLLM = ("/abort_requests", "/inference/v1/abort_requests")
"""The first is the development mode's, the other a scale-out deployment's."""

_PAUSE_VLLM = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class _NoRoute(Exception):
    """The engine cannot abort one generation; the message says why."""


class _Workers(msgspec.Struct):
    """What a router answers to `GET /workers`: objects with a `url`, if it is as it should be."""

    workers: list[Any]


class EngineControl:
    """`dialect` is the operator's setting for all engines; `known`, below, the dialect observed of one. `api_key` is
    sent to engines, and of a router's workers to those that `is_engine` knows by their base URL or `router_workers`
    name.

    Commands are idempotent, so one is repeated if its connection was lost. Methods return None, or why the engine did
    not obey.
    """

    def __init__(
        self,
        client: EngineClient,
        dialect: DialectChoice,
        api_key: str | None,
        is_engine: Callable[[str], bool],
        router_workers: Sequence[AddressPattern] = (),
    ) -> None:
        self._client = client
        self._dialect = dialect
        self._with_key, self._without_key = to_control(api_key), to_control(None)
        self._is_engine = is_engine
        self._router_workers = router_workers

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
            return await self._abort(url, rids, known, self._with_key)
        except _NoRoute as error:
            why = str(error)
        told = await asyncio.gather(
            *(
                self._abort_at(number, worker, rids, known)
                for number, worker in enumerate(await self._workers(url), start=1)
            )
        )
        if not told:
            return dict.fromkeys(rids, why)
        return {
            rid: next((f"worker {name}: {errors[rid]}" for name, errors in told if errors[rid]), None) for rid in rids
        }

    async def _abort(
        self, url: str, rids: Sequence[str], known: Dialect | None, headers: Headers
    ) -> dict[str, str | None]:
        """The error of each, if any. Raises _NoRoute."""
        dialect = known if self._dialect == "auto" else self._dialect
        if dialect == "vllm":
            return dict.fromkeys(rids, await self._abort_vllm(url, rids, headers))
        statuses = await self._abort_sglang(url, rids, headers)
        if all(status == 404 for status, _ in statuses):
            if dialect is not None:
                raise _NoRoute("it has no /abort_request")
            return dict.fromkeys(rids, await self._abort_vllm(url, rids, headers))
        return dict(zip(rids, (error for _, error in statuses), strict=True))

    async def _abort_at(
        self, number: int, worker: str | None, rids: Sequence[str], known: Dialect | None
    ) -> tuple[str, dict[str, str | None]]:
        """The name of a router's worker, and the errors that it answers."""
        if worker is None:
            return str(number), dict.fromkeys(rids, "the router's list does not give a base URL for it")
        if number > MOST_WORKERS:
            return worker, dict.fromkeys(rids, f"the router's list has more than {MOST_WORKERS}")
        try:
            return worker, await self._abort(worker, rids, known, self._headers_to(worker))
        except _NoRoute as error:
            return worker, dict.fromkeys(rids, str(error))

    async def _workers(self, url: str) -> list[str | None]:
        """The base URLs of a router's workers, None for one without a valid one; none if it is no router, or does not
        answer."""
        try:
            async with asyncio.timeout(ABORT_S):
                reply = await self._client.get(url + "/workers", self._with_key)
            listing = msgspec.json.decode(reply.body.joined(), type=_Workers) if reply.status == 200 else _Workers([])
        except (EngineError, TimeoutError, *UNREADABLE):
            return []
        return [_worker_url(worker) for worker in listing.workers]

    def _headers_to(self, worker: str) -> Headers:
        is_known = self._is_engine(worker) or any(pattern.matches(worker) for pattern in self._router_workers)
        return self._with_key if is_known else self._without_key

    async def _abort_sglang(
        self, url: str, rids: Sequence[str], headers: Headers
    ) -> list[tuple[int | None, str | None]]:
        """Status and error for each. If one gets no answer, the remaining ones are not sent: each would wait as
        long."""
        slots = asyncio.Semaphore(AT_ONCE)
        no_answer: str | None = None

        async def abort(rid: str) -> tuple[int | None, str | None]:
            nonlocal no_answer
            async with slots:
                if no_answer is not None:
                    return None, no_answer
                body = {"rid": rid, "abort_all": False}
                status, error = await self._post(url, "/abort_request", body, ABORT_S, headers)
                no_answer = error if status is None else no_answer
            return status, error

        return await asyncio.gather(*map(abort, rids))

    async def _abort_vllm(self, url: str, rids: Sequence[str], headers: Headers) -> str | None:
        """The error, if any, which is the same for all: they are one request. Raises _NoRoute."""
        body = {"request_ids": [request_id for rid in rids for request_id in vllm_request_ids(rid)]}
        refused: list[str] = []
        for path in _ABORT_VLLM:
            status, error = await self._post(url, path, body, ABORT_S, headers)
            if status not in (403, 404, 405):
                return error
            refused.append(f"{path} answers {status}")
        raise _NoRoute(f"it aborts no single generation ({', '.join(refused)}); vLLM does with VLLM_SERVER_DEV_MODE=1")

    async def _in_dialect(
        self, url: str, sglang: tuple[str, object], vllm: str, known: Dialect | None, within_s: float
    ) -> str | None:
        dialect = known if self._dialect == "auto" else self._dialect
        if dialect != "vllm":
            status, error = await self._post(url, *sglang, within_s, self._with_key)
            if status != 404 or dialect is not None:
                return error
        status, error = await self._post(url, vllm, None, within_s, self._with_key)
        return "it has no route for this" if status == 404 and dialect is None else error

    async def _post(
        self, url: str, path: str, body: object, within_s: float, headers: Headers, *, may_retry: bool = True
    ) -> tuple[int | None, str | None]:
        """The status, if there was an answer, and the error, if any."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(within_s):
                reply = await self._client.post(url + path, data, headers)
        except Lost as error:
            if may_retry:
                return await self._post(url, path, body, within_s, headers, may_retry=False)
            return None, f"{path}: {error}"
        except EngineError as error:
            return None, f"{path}: {error}"
        except TimeoutError:
            return None, f"{path}: no answer within {within_s:g} s"
        return reply.status, None if reply.status == 200 else f"{path}: it answered {reply.status}"


def _worker_url(worker: Any) -> str | None:
    url = worker.get("url") if isinstance(worker, dict) else None
    if not isinstance(url, str) or base_url_fault(url) is not None:
        return None
    return plain_base_url(url)


def vllm_request_ids(rid: str) -> tuple[str, str, str]:
    """vLLM's ids of a chat, a completion and a prompt of ids that were sent with this `X-Request-Id`; only one of them
    is there."""
    return f"chatcmpl-{rid}", f"cmpl-{rid}-0", f"generate-tokens-{rid}"
