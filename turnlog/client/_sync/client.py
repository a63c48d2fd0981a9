# Made from turnlog/client/_async by `python -m ops.unasync`. Do not edit.
"""The client: sessions for rollout code, exports and the feed for trainers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, cast, overload

from turnlog.client import frames
from turnlog.client._sync.session import Session
from turnlog.client._sync.transport import Transport
from turnlog.client.address import below_run, default_address, default_run, default_token, segment
from turnlog.client.checked import checked, wanted
from turnlog.client.lines import AllEventsPlace, ExportPlace, Object, decode, is_event, present
from turnlog.client.renewal import Renewal
from turnlog.errors import TurnlogError
from turnlog.events import Event, UnreadableEvent
from turnlog.parameters import (
    PAGE,
    SEARCH_PAGE,
    CheckpointFilters,
    EventParameters,
    ExportFilters,
    ExportParameters,
    FeedFilters,
    FeedParameters,
    NewSession,
    SearchFilters,
    Selection,
    SessionFilters,
    Shape,
    TrainerShape,
)
from turnlog.replies import (
    AdapterState,
    Checkpoint,
    Engine,
    Group,
    ListedGroup,
    ListedRun,
    ListedSession,
    PausedAdapter,
    RestoredStore,
    Run,
    RunToken,
    SearchHit,
    ToldFleet,
)
from turnlog.rows import Acknowledged, Excluded, LeasedGroup, Row, TrainerRow, WaitingGroup

if TYPE_CHECKING:
    import datasets
    import pandas
    import polars

log = logging.getLogger("turnlog.client")

LONGEST_VERSION = 512

R = TypeVar("R")
"""The type of an export's rows."""


class Turnlog:
    """A Turnlog server. Close it, or use it as a context manager.

    base_url: its address; by default `TURNLOG_URL`, else http://127.0.0.1:8000.
    token: the admin token, a run's or a session's; by default `TURNLOG_TOKEN`, else the first of `TURNLOG_ADMIN_TOKEN`.
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
        self._transport = Transport(
            base_url or default_address(), token or default_token(), retry_for_s, timeout_s, proxy
        )

    @property
    def base_url(self) -> str:
        return self._transport.base_url

    @property
    def own_run(self) -> str | None:
        """The run of new sessions and of calls that name none: `TURNLOG_RUN`, else the run of the token."""
        return default_run(self._transport.token)

    def create_session(self, **fields: Unpack[NewSession]) -> Session:
        """Create a session. Fields that are None get the server's defaults; docs/api.md describes them.

        The id is random unless given. The same id with the same fields returns the same session again. Raises Conflict
        if the id is in use, InvalidRequest, Unavailable; TypeError and ValueError before anything is sent.
        """
        body = checked(NewSession, fields)
        body["session_id"] = body.get("session_id") or uuid.uuid4().hex
        if body.get("run") is None and (run := self.own_run) is not None:
            body["run"] = run
        body |= {name: dict(body[name]) for name in ("metadata", "params", "limits") if name in body}
        made = self._transport.read("POST", "/sessions", body=body)
        return Session(self._transport, made["session_id"], made.get("token"), made.get("url"))

    def attach(self, session_id: str, token: str | None = None) -> Session:
        """An existing session; sends no request. Raises ValueError for an invalid id."""
        return Session(self._transport, session_id, token)

    def sessions(self, limit: int | None = None, **filters: Unpack[SessionFilters]) -> Iterator[ListedSession]:
        """Sessions that match all filters, at most `limit`; by default newest first. Needs the admin token or
        a run's.

        `metadata` maps keys to values; a dot in a key leads into an object. Raises InvalidRequest.
        """
        given = wanted(SessionFilters, filters)
        given.setdefault("order", "desc")  # a server that also speaks rLLM's wire tells the two lists apart by it
        for one in self._pages("/sessions", "sessions", given, limit):
            yield cast(ListedSession, one)

    def groups(self, limit: int | None = None, **filters: Unpack[Selection]) -> Iterator[ListedGroup]:
        """Groups with their progress and the statistics of their rewards, by id; of metadata, those that a session of
        the group has. Needs the admin token or a run's."""
        for one in self._pages("/groups", "groups", wanted(Selection, filters), limit):
            yield cast(ListedGroup, one)

    def _pages(self, path: str, name: str, given: Object, limit: int | None, most: int = PAGE) -> Iterator[Object]:
        """The items of all pages of a list, at most `limit`."""
        left = limit
        cursor: str | None = None
        while left is None or left > 0:
            size = most if left is None else min(most, left)
            page = self._transport.read("GET", path, parameters={**given, "limit": size, "cursor": cursor})
            yield from page[name]
            left = None if left is None else left - len(page[name])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def search(
        self, q: str | None = None, limit: int | None = None, **filters: Unpack[SearchFilters]
    ) -> Iterator[SearchHit]:
        """Messages, tool calls and results that match, at most `limit`, newest first: session, turn, message, a snippet
        and the places in it that match. Needs the admin token or a run's.

        Raises InvalidRequest; NotFound if the server's search is off; TypeError and ValueError before anything is sent.
        """
        given = {**wanted(SearchFilters, filters), **present({"q": q})}
        for one in self._pages("/search", "hits", given, limit, SEARCH_PAGE):
            yield cast(SearchHit, one)

    def group(self, group_id: str, *, run: str | None = None) -> Group:
        """A group's sessions, and the statistics of their rewards.

        run: by default `TURNLOG_RUN`, else the default run, else the only one that has a group with this id. Raises
        NotFound, InvalidRequest.
        """
        given = present({"run": run or self.own_run})
        return cast(Group, self._transport.read("GET", f"/groups/{segment(group_id)}", parameters=given))

    @overload
    def export(
        self,
        *,
        shape: Literal["turnlog"] = "turnlog",
        explain: Literal[False] = False,
        **filters: Unpack[ExportFilters],
    ) -> Export[Row]: ...

    @overload
    def export(
        self, *, shape: Literal["turnlog"] = "turnlog", explain: bool, **filters: Unpack[ExportFilters]
    ) -> Export[Row | Excluded]: ...

    @overload
    def export(
        self, *, shape: TrainerShape, explain: bool = False, **filters: Unpack[ExportFilters]
    ) -> Export[TrainerRow]: ...

    def export(
        self, *, shape: Shape = "turnlog", explain: bool = False, **filters: Unpack[ExportFilters]
    ) -> Export[Any]:
        """Training rows as they arrive. With `explain` also an object with `excluded` for what has no row.

        Raises TypeError and ValueError for an invalid parameter, before anything is sent.
        """
        given = wanted(ExportParameters, {"shape": shape, "explain": explain or None, **filters})
        return Export(self._transport, ExportPlace(given))

    def events(self, **parameters: Unpack[EventParameters]) -> Events:
        """The events of all sessions in the order of commits; with `follow` also new ones, without an end.

        Raises TypeError and ValueError for an invalid parameter, before anything is sent.
        """
        return Events(self._transport, AllEventsPlace(wanted(EventParameters, parameters)))

    @overload
    def hand_out(
        self,
        consumer: str,
        *,
        shape: Literal["turnlog"] = "turnlog",
        explain: Literal[False] = False,
        **filters: Unpack[FeedFilters],
    ) -> list[LeasedGroup[Row]]: ...

    @overload
    def hand_out(
        self, consumer: str, *, shape: Literal["turnlog"] = "turnlog", explain: bool, **filters: Unpack[FeedFilters]
    ) -> list[LeasedGroup[Row] | WaitingGroup]: ...

    @overload
    def hand_out(
        self, consumer: str, *, shape: TrainerShape, explain: Literal[False] = False, **filters: Unpack[FeedFilters]
    ) -> list[LeasedGroup[TrainerRow]]: ...

    @overload
    def hand_out(
        self, consumer: str, *, shape: TrainerShape, explain: bool, **filters: Unpack[FeedFilters]
    ) -> list[LeasedGroup[TrainerRow] | WaitingGroup]: ...

    def hand_out(
        self, consumer: str, *, shape: Shape = "turnlog", explain: bool = False, **filters: Unpack[FeedFilters]
    ) -> Any:
        """Up to `size` (default: one) complete groups with their rows, leased to `consumer` until it acknowledges them.

        They are those of `run`, by default of `TURNLOG_RUN`, else of the default run; `*`: of all runs. First the
        groups that it has not acknowledged, unless `new_only`. With `explain` also an object with `excluded`
        for each other waiting group. With `new_only`, the groups of a lost reply are given again when their lease ends.
        Raises TypeError and ValueError for an invalid parameter, before anything is sent.
        """
        given = wanted(FeedParameters, {"shape": shape, "explain": explain or None, **filters})
        given |= {"consumer": consumer, **present({"run": given.get("run") or self.own_run})}
        once = filters.get("new_only", False)
        content = self._transport.call("GET", "/export/groups", parameters=given, slow=True, once=once)
        return [decode(line) for line in content.split(b"\n") if line]

    def acknowledge(self, consumer: str, group_ids: Sequence[str], *, run: str | None = None) -> Acknowledged:
        """Acknowledge groups of a run for good, by default of `TURNLOG_RUN`, else of the default run.

        Returns which were `acknowledged`, `already`, `not_leased` or `unknown`.
        """
        body = {"consumer": consumer, "groups": list(group_ids), **present({"run": run or self.own_run})}
        return cast(Acknowledged, self._transport.read("POST", "/export/groups/ack", body=body))

    def runs(self, limit: int | None = None) -> Iterator[ListedRun]:
        """All runs with their sessions, turns, groups and rewards, by name. Needs the admin token."""
        for one in self._pages("/runs", "runs", {}, limit):
            yield cast(ListedRun, one)

    def run(self, name: str) -> Run:
        """A run's figures. Raises NotFound."""
        return cast(Run, self._transport.read("GET", f"/runs/{segment(name)}"))

    def put_run(
        self,
        name: str,
        *,
        live: int | None = None,
        tokens: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        note: str | None = None,
    ) -> Run:
        """Set a run's limits, metadata and note, replacing the earlier ones.

        `live`: sessions that may be open at a time; `tokens`: sampled tokens in all. Raises Conflict for a run
        that has ended.
        """
        limits = present({"live": live, "tokens": tokens})
        body = {"limits": limits, **present({"metadata": None if metadata is None else dict(metadata), "note": note})}
        return cast(Run, self._transport.read("PUT", f"/runs/{segment(name)}", body=body))

    def close_run(self, name: str) -> None:
        """Close a run and its open sessions: no session can be created in it any more. Raises NotFound."""
        self._transport.call("DELETE", f"/runs/{segment(name)}", slow=True)

    def erase_run(self, name: str) -> bool:
        """Close a run and erase all of its sessions permanently; then its name may be used anew. False: object
        storage or archives still have some of it, and the server goes on; call again until True. Raises NotFound."""
        return self._transport.erase(f"/runs/{segment(name)}")

    def engines(self, *, run: str | None = None) -> list[Engine]:
        """All engines, or those that serve a run."""
        found = self._transport.read("GET", "/engines", parameters=present({"run": run}))
        return cast(list[Engine], found["engines"])

    def add_engine(self, url: str, *, run: str | None = None) -> Engine:
        """Add an engine, or bring back one that was drained or removed; with `run` it serves that run alone, with `*`
        all that have none of their own. Without `run` it serves whom it served before, a new one as with `*`.

        Raises Conflict for an engine that serves others: remove it first. Raises InvalidRequest.
        """
        body: Object = {"url": url} if run is None else {"url": url, "run": None if run == "*" else run}
        return cast(Engine, self._transport.read("POST", "/engines", body=body))

    def remove_engine(self, url: str) -> None:
        """Take an engine out of the pool; turns in flight end there. Raises NotFound."""
        self._transport.call("DELETE", "/engines", parameters={"url": url})

    def pause_adapter(self, name: str, *, lease_s: float | None = None, run: str | None = None) -> PausedAdapter:
        """Hold the adapter's turns, with `run` those of that run, and abort their generations, until `resume_adapter`
        or the end of the lease.

        Raises EnginesFailed if an engine failed; the gate is shut nevertheless.
        """
        path = below_run(run, f"/adapters/{segment(name)}/pause")
        return cast(PausedAdapter, self._transport.read("POST", path, body=present({"lease_s": lease_s}), slow=True))

    def resume_adapter(self, name: str, *, version: str | None = None, run: str | None = None) -> AdapterState:
        """Let the adapter's turns proceed; `version` is the version of its weights from now on."""
        path = below_run(run, f"/adapters/{segment(name)}/resume")
        return cast(AdapterState, self._transport.read("POST", path, body=present({"version": version})))

    def pause_fleet(
        self,
        *,
        mode: Literal["abort", "in_place", "retract"] | None = None,
        lease_s: float | None = None,
        run: str | None = None,
    ) -> ToldFleet:
        """Hold all turns and pause every engine; with `run` that run's turns, and its own engines. Raises
        EnginesFailed; the gate is shut nevertheless."""
        body = present({"mode": mode, "lease_s": lease_s})
        return cast(ToldFleet, self._transport.read("POST", below_run(run, "/fleet/pause"), body=body, slow=True))

    def resume_fleet(self, *, version: str | None = None, run: str | None = None) -> ToldFleet:
        """Resume every engine and let all turns proceed; with `run` that run's. `version` is the weight version of
        engines that cannot say theirs. Raises EnginesFailed; the gate is open nevertheless.
        """
        body = present({"version": version})
        return cast(ToldFleet, self._transport.read("POST", below_run(run, "/fleet/resume"), body=body, slow=True))

    @contextmanager
    def weights(
        self,
        version: str | int | None = None,
        *,
        adapter: str | None = None,
        run: str | None = None,
        mode: Literal["abort", "in_place", "retract"] | None = None,
        lease_s: float = 120.0,
    ) -> Iterator[ToldFleet | PausedAdapter]:
        """Hold the turns while the body changes the weights, then let them proceed with `version`; yields how each
        engine took the pause.

        run: by default `TURNLOG_RUN`; `*`, and without either: all turns. adapter: those of one adapter.
        lease_s: the pause ends so long after the death of this process; until then a thread renews it.

        After an exception in the body the turns proceed with the version from before. Raises EnginesFailed; if an
        engine did not accept the pause, the body does not run and nothing stays paused. Raises ValueError for an
        invalid version, and for `mode` with `adapter`.
        """
        if adapter is not None and mode is not None:
            raise ValueError("mode is the fleet's; an adapter's generations are always aborted")
        said = present({"version": None if version is None else str(version)})
        if said and not 1 <= len(said["version"]) <= LONGEST_VERSION:  # the resume would be too late to be refused
            raise ValueError(f"a weight version has 1 to {LONGEST_VERSION} characters")
        whose = run or self.own_run
        gate = "/fleet" if adapter is None else f"/adapters/{segment(adapter)}"
        path, known_as = below_run(None if whose == "*" else whose, gate), "version" if adapter else "weight_version"
        body = present({"lease_s": lease_s, "mode": mode})
        try:
            paused = self._transport.read("POST", f"{path}/pause", body=body, slow=True)
        except BaseException as error:
            told = error if isinstance(error, TurnlogError) else TurnlogError("")
            if told.status is None or told.status >= 500:  # else the order was refused
                self._reopen(path, told.body.get(known_as))
            raise
        server = self.base_url, self._transport.token, self._transport.proxy
        try:
            with Renewal(*server, f"{path}/pause", paused["closings"], lease_s):
                yield cast(ToldFleet, paused)
        except BaseException:
            self._reopen(path, paused[known_as])
            raise
        self._transport.call("POST", f"{path}/resume", body=said, slow=True)

    def _reopen(self, path: str, version: str | None) -> None:
        """Resume after an error, which an error of the resume must not hide."""
        try:
            self._transport.call("POST", f"{path}/resume", body=present({"version": version}), slow=True)
        except TurnlogError as error:
            log.warning("%s is paused until its lease ends: %s", path, error)

    def checkpoint(
        self,
        name: str,
        *,
        run: str | None = None,
        drain: bool = False,
        drain_s: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Save the state of all sessions, groups and acknowledgements of a run: by default `TURNLOG_RUN`, else the
        default run; `*`: of the whole store. Needs the admin token or the run's.

        `drain`: hold the run's new turns and wait up to `drain_s` seconds (default: 600) for those in flight. Raises
        Conflict if the name is in use, also by an earlier attempt of this call whose reply was lost.
        """
        given = {"run": run or self.own_run, "drain_s": drain_s, "metadata": metadata}
        body = {"name": name, "cut": "drain" if drain else "now", **present(given)}
        return cast(Checkpoint, self._transport.read("POST", "/checkpoints", body=body, slow=True))

    def checkpoints(self, **filters: Unpack[CheckpointFilters]) -> list[Checkpoint]:
        """The checkpoints of a run, of the whole store (`*`), or all, the oldest first; only those whose metadata has
        these values. Raises TypeError and ValueError before anything is sent."""
        given = wanted(CheckpointFilters, filters)
        found: list[Checkpoint] = (self._transport.read("GET", "/checkpoints", parameters=given))["checkpoints"]
        return found

    def restore_checkpoint(self, name: str, *, run: str | None = None) -> RestoredStore:
        """Restore a run to its checkpoint; `run` as in `checkpoint`. Nothing is deleted: the reply's `before` names the
        checkpoint of its state before.

        Raises NotFound, Conflict.
        """
        path, given = f"/checkpoints/{segment(name)}/restore", present({"run": run or self.own_run})
        return cast(RestoredStore, self._transport.read("POST", path, parameters=given, slow=True))

    def delete_checkpoint(self, name: str, *, run: str | None = None) -> None:
        """Delete a checkpoint; `run` as in `checkpoint`. Sessions stay as they are. Raises NotFound, Conflict."""
        given = present({"run": run or self.own_run})
        self._transport.call("DELETE", f"/checkpoints/{segment(name)}", parameters=given)

    def run_token(self, run: str) -> str:
        """Create the run's token, or replace it. It is for everything within the run and nothing outside.
        Needs the admin token."""
        made = cast(RunToken, self._transport.read("POST", f"/runs/{segment(run)}/token"))
        return made["token"]

    def end_run_token(self, run: str) -> None:
        """Revoke the run's token. Needs the admin token."""
        self._transport.call("DELETE", f"/runs/{segment(run)}/token")

    def close(self) -> None:
        """Close the connections; sessions stay as they are."""
        self._transport.close()

    def __enter__(self) -> Turnlog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Export(Generic[R]):
    """The rows of one export as dicts. After a broken connection it resumes without a gap or a repetition.

    Reading raises InvalidRequest for an invalid parameter or cursor.
    """

    def __init__(self, transport: Transport, place: ExportPlace) -> None:
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

    def __iter__(self) -> Iterator[R]:
        return cast(Iterator[R], self._transport.lines("/export", self._place))

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as one frame: a list of numbers is a numpy array, an object is a dict.

        Raises ModuleNotFoundError without pandas, before anything is sent.
        """
        frames.load("pandas")
        return frames.to_pandas(self._read())

    def to_polars(self) -> polars.DataFrame:
        """The rows as one frame: a list is a polars list, an object (`messages`, `metadata`) is JSON text.

        Raises ModuleNotFoundError without polars, before anything is sent.
        """
        frames.load("polars")
        return frames.to_polars(self._read())

    def to_dataset(self) -> datasets.Dataset:
        """The rows as a dataset in memory: a list is a list, an object (`messages`, `metadata`) is JSON text.

        Raises ModuleNotFoundError without datasets, before anything is sent.
        """
        frames.load("datasets")
        return frames.to_dataset(self._read())

    def _read(self) -> list[Mapping[str, Any]]:
        return [cast(Mapping[str, Any], row) for row in self]


class Events:
    """The events of all sessions, as they arrive. Can be iterated once.

    A broken connection causes no gap and no repetition. Raises PositionGone if the store was restored since, or a crash
    of the database undid what was read last: begin anew, without a position.
    """

    def __init__(self, transport: Transport, place: AllEventsPlace) -> None:
        self._transport = transport
        self._place = place

    @property
    def position(self) -> str | None:
        """Resumes after the last event, or further on where a filter has left out what follows it: `after=position`."""
        return self._place.position

    def __iter__(self) -> Iterator[Event | UnreadableEvent]:
        for line in self._transport.lines("/events", self._place):
            if is_event(line):
                yield cast(Event | UnreadableEvent, line)
