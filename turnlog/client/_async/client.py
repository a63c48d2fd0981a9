"""The client: sessions for rollout code, exports and the feed for trainers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Unpack

from turnlog.client._async.session import AsyncSession
from turnlog.client._async.transport import AsyncTransport
from turnlog.client.address import default_address, default_token, segment
from turnlog.client.lines import AllEventsPlace, ExportPlace, Object, decode, is_event, present
from turnlog.parameters import EventParameters, ExportParameters, FeedParameters


class AsyncTurnlog:
    """A Turnlog server. Close it, or use it as a context manager.

    base_url: its address; by default `TURNLOG_URL`, else http://127.0.0.1:8000.
    token: the admin token, or a session's; by default `TURNLOG_TOKEN`, else the first of `TURNLOG_ADMIN_TOKEN`.
    retry_for_s: how long a request is retried after a temporary failure, such as the restart of a server.
    timeout_s: how long one reply may take.
    proxy: the URL of an HTTP proxy, also for the clients of `session.openai()`. Variables such as `HTTP_PROXY` are not
        read.

    Raises ValueError for an invalid address, and for a token that no header can hold.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: str | None = None,
        retry_for_s: float = 15.0,
        timeout_s: float = 30.0,
        proxy: str | None = None,
    ) -> None:
        self._transport = AsyncTransport(
            base_url or default_address(), token or default_token(), retry_for_s, timeout_s, proxy
        )

    @property
    def base_url(self) -> str:
        return self._transport.base_url

    async def create_session(
        self,
        *,
        session_id: str | None = None,
        group_id: str | None = None,
        attempt: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        rollback_window: int | None = None,
        retain: Literal["window", "all"] | None = None,
        history: Literal["linear", "tree"] | None = None,
        on_divergence: Literal["reject", "segment"] | None = None,
        on_drift: Literal["segment", "reject"] | None = None,
        matcher: Literal["tolerant", "strict", "role_content_only"] | None = None,
        adapter: str | None = None,
        on_abort: Literal["return", "continue", "fail"] | None = None,
        stream_mode: Literal["whole", "live"] | None = None,
        params: Mapping[str, Any] | None = None,
        model: str | None = None,
        params_mode: Literal["override", "refuse"] | None = None,
        evaluation: bool | None = None,
        parent_session_id: str | None = None,
    ) -> AsyncSession:
        """Create a session. Arguments that are None get the server's defaults; docs/api.md describes them.

        The id is random unless given. The same id with the same fields returns the same session again. Raises Conflict
        if the id is in use, InvalidRequest, Unavailable.
        """
        given = {
            "session_id": session_id or uuid.uuid4().hex,
            "group_id": group_id,
            "attempt": attempt,
            "metadata": None if metadata is None else dict(metadata),
            "rollback_window": rollback_window,
            "retain": retain,
            "history": history,
            "on_divergence": on_divergence,
            "on_drift": on_drift,
            "matcher": matcher,
            "adapter": adapter,
            "on_abort": on_abort,
            "stream_mode": stream_mode,
            "params": None if params is None else dict(params),
            "model": model,
            "params_mode": params_mode,
            "evaluation": evaluation,
            "parent_session_id": parent_session_id,
        }
        body = {name: value for name, value in given.items() if value is not None}
        made = await self._transport.read("POST", "/sessions", body=body)
        return AsyncSession(self._transport, made["session_id"], made.get("token"))

    def attach(self, session_id: str, token: str | None = None) -> AsyncSession:
        """An existing session; sends no request. Raises ValueError for an invalid id."""
        return AsyncSession(self._transport, session_id, token)

    async def sessions(
        self, *, status: Literal["open", "closed", "erased", "set_aside"] | None = None, group_id: str | None = None
    ) -> AsyncIterator[Object]:
        """All sessions, newest first: id, status, turns, reward, times."""
        given: Object = {"status": status, "group_id": group_id, "limit": 1000}
        parameters = present(given)
        while True:
            page = await self._transport.read("GET", "/sessions", parameters=parameters)
            for one in page["sessions"]:
                yield one
            if page["next_cursor"] is None:
                return
            parameters["cursor"] = page["next_cursor"]

    async def search(
        self,
        q: str | None = None,
        *,
        role: str | None = None,
        tool: str | None = None,
        finish_reason: str | None = None,
        reason: str | None = None,
        session_id: str | None = None,
        metadata: str | None = None,
        status: Literal["open", "closed", "erased", "set_aside"] | None = None,
        group_id: str | None = None,
        tag: str | None = None,
    ) -> AsyncIterator[Object]:
        """Messages, tool calls and results that match, newest first, page after page: session, turn, message, a snippet
        and the places in it that match. `metadata` is `key=value`. Needs the admin token.

        Raises InvalidRequest, also if the server makes no search index (`search_off`).
        """
        given = {
            "q": q,
            "role": role,
            "tool": tool,
            "finish_reason": finish_reason,
            "reason": reason,
            "session_id": session_id,
            "metadata": metadata,
            "status": status,
            "group_id": group_id,
            "tag": tag,
        }
        parameters = present(given)
        while True:
            page = await self._transport.read("GET", "/search", parameters=parameters)
            for one in page["hits"]:
                yield one
            if page["next_cursor"] is None:
                return
            parameters["cursor"] = page["next_cursor"]

    async def group(self, group_id: str) -> Object:
        """A group's sessions, and the statistics of their rewards. Raises NotFound."""
        return await self._transport.read("GET", f"/groups/{segment(group_id)}")

    def export(self, **parameters: Unpack[ExportParameters]) -> AsyncExport:
        """Training rows as they arrive."""
        return AsyncExport(self._transport, ExportPlace(present(parameters)))

    def events(self, **parameters: Unpack[EventParameters]) -> AsyncEvents:
        """The events of all sessions in the order of commits; with `follow` also new ones, without an end."""
        return AsyncEvents(self._transport, AllEventsPlace(present(parameters)))

    async def hand_out(self, consumer: str, **parameters: Unpack[FeedParameters]) -> list[Object]:
        """Up to `size` (default: one) complete groups with their rows, leased to `consumer` until it acknowledges them.

        First the groups that it has not acknowledged, unless `new_only`. With `explain` also an object with `excluded`
        for each other waiting group. With `new_only`, the groups of a lost reply are given again when their lease ends.
        """
        given = {**parameters, "consumer": consumer}
        once = parameters.get("new_only", False)
        reply = await self._transport.call("GET", "/export/groups", parameters=given, slow=True, once=once)
        return [decode(line) for line in reply.content.split(b"\n") if line]

    async def acknowledge(self, consumer: str, group_ids: Sequence[str]) -> Object:
        """Acknowledge groups for good. Returns which were `acknowledged`, `already`, `not_leased` or `unknown`."""
        body = {"consumer": consumer, "groups": list(group_ids)}
        return await self._transport.read("POST", "/export/groups/ack", body=body)

    async def pause_adapter(self, name: str, *, lease_s: float | None = None) -> Object:
        """Hold the adapter's turns and abort its generations, until `resume_adapter` or the end of the lease.

        Raises EnginesFailed if an engine did not accept the order; the gate is shut nevertheless.
        """
        path = f"/adapters/{segment(name)}/pause"
        return await self._transport.read("POST", path, body=present({"lease_s": lease_s}), slow=True)

    async def resume_adapter(self, name: str, *, version: str | None = None) -> Object:
        """Let the adapter's turns proceed; `version` is the version of its weights from now on."""
        path = f"/adapters/{segment(name)}/resume"
        return await self._transport.read("POST", path, body=present({"version": version}))

    async def pause_fleet(
        self, *, mode: Literal["abort", "in_place", "retract"] | None = None, lease_s: float | None = None
    ) -> Object:
        """Hold all turns and pause every engine. Raises EnginesFailed; the gate is shut nevertheless."""
        body = present({"mode": mode, "lease_s": lease_s})
        return await self._transport.read("POST", "/fleet/pause", body=body, slow=True)

    async def resume_fleet(self, *, version: str | None = None) -> Object:
        """Resume every engine and let all turns proceed. `version` is the weight version of engines that cannot say
        theirs. Raises EnginesFailed; the gate is open nevertheless.
        """
        body = present({"version": version})
        return await self._transport.read("POST", "/fleet/resume", body=body, slow=True)

    async def checkpoint(self, name: str, *, drain: bool = False, drain_s: float | None = None) -> Object:
        """Name a cut over all sessions, groups and acknowledgements. Needs the admin token.

        `drain`: hold new turns and wait up to `drain_s` seconds (default: 600) for those in flight. Raises Conflict if
        the name is in use, also by an earlier attempt of this call whose reply was lost.
        """
        body = {"name": name, "cut": "drain" if drain else "now", **present({"drain_s": drain_s})}
        return await self._transport.read("POST", "/checkpoints", body=body, slow=True)

    async def checkpoints(self) -> list[Object]:
        """All checkpoints, the oldest first."""
        found: list[Object] = (await self._transport.read("GET", "/checkpoints"))["checkpoints"]
        return found

    async def restore_checkpoint(self, name: str) -> Object:
        """Take the store back to a checkpoint; nothing is deleted. The reply's `before` names what it was instead.

        Raises NotFound, Conflict.
        """
        return await self._transport.read("POST", f"/checkpoints/{segment(name)}/restore", slow=True)

    async def delete_checkpoint(self, name: str) -> None:
        """Delete a checkpoint; sessions stay as they are. Raises NotFound, Conflict."""
        await self._transport.call("DELETE", f"/checkpoints/{segment(name)}")

    async def aclose(self) -> None:
        """Close the connections; sessions stay as they are."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncTurnlog:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncExport:
    """The rows of one export as dicts. After a broken connection it resumes without a gap or a repetition.

    Reading raises InvalidRequest for an invalid parameter or cursor.
    """

    def __init__(self, transport: AsyncTransport, place: ExportPlace) -> None:
        self._transport = transport
        self._place = place

    @property
    def cursor(self) -> str | None:
        """Resumes after the last row returned."""
        return self._place.cursor

    @property
    def next_cursor(self) -> str | None:
        """Resumes after the whole export, with what has changed since it began. With `limit`: None until it has been
        read to its end."""
        return self._place.next_cursor

    def __aiter__(self) -> AsyncIterator[Object]:
        return self._transport.lines("/export", self._place)


class AsyncEvents:
    """The events of all sessions, as they arrive. Can be iterated once.

    A broken connection causes no gap and no repetition. Raises PositionGone if the store was restored since, or a crash
    of the database undid what was read last: begin anew, without a position.
    """

    def __init__(self, transport: AsyncTransport, place: AllEventsPlace) -> None:
        self._transport = transport
        self._place = place

    @property
    def position(self) -> str | None:
        """Resumes after the last event, or further on where a filter has left out what follows it: `after=position`."""
        return self._place.position

    async def __aiter__(self) -> AsyncIterator[Object]:
        async for line in self._transport.lines("/events", self._place):
            if is_event(line):
                yield line
