"""One session, for rollout code."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from turnlog.client._async.transport import AsyncTransport
from turnlog.client.address import segment, session_path
from turnlog.client.checked import checked
from turnlog.client.columns import NPY, to_array, to_npy
from turnlog.client.lines import EventsPlace, Object, present
from turnlog.client.samples import Samples, parse
from turnlog.errors import SessionClosed
from turnlog.events import Event
from turnlog.parameters import Failure, TreeParameters
from turnlog.replies import FinishedSession, ListedAnnotation, Records, State, Tree

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from openai import AsyncOpenAI

OPENAI_RETRIES = 5
"""The SDK pauses 0.5 s, then twice as long each time: 15 s in all, enough for a server's restart."""


class AsyncSession:
    """Returned by `AsyncTurnlog.create_session` and `attach`. As a context manager it closes the session at the end.

    token: the session's own, for the agent; it permits only this session's routes. None if the server needs no token.
    url: its address for agents elsewhere: below the server's `TURNLOG_PUBLIC_URL` if that is set and the session was
        created here.
    """

    def __init__(self, transport: AsyncTransport, session_id: str, token: str | None, url: str | None = None) -> None:
        self.id = session_id
        self.token = token
        self._transport = transport
        self._path = session_path(session_id)
        self.url = url or self.anthropic_base_url

    @property
    def base_url(self) -> str:
        """The `base_url` of an OpenAI client, or of Codex' model provider."""
        return f"{self._transport.base_url}{self._path}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """The `base_url` of an Anthropic client, which adds `/v1` itself; `ANTHROPIC_BASE_URL` for Claude Code."""
        return f"{self._transport.base_url}{self._path}"

    def openai(self, **options: Any) -> AsyncOpenAI:
        """An OpenAI client for this session; `options` are the OpenAI client's. The caller closes it.

        It uses the proxy given to `AsyncTurnlog`, and none from the environment, unless `http_client` is given.
        Raises ImportError without the package `openai`.
        """
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as error:
            raise ImportError("session.openai() needs the package openai: pip install openai") from error
        given = {"api_key": self.token or "unused", "max_retries": OPENAI_RETRIES, **options}
        if "http_client" not in given:
            given["http_client"] = DefaultAsyncHttpxClient(trust_env=False, proxy=self._transport.proxy)
        return AsyncOpenAI(base_url=self.base_url, **given)

    async def set_reward(
        self, reward: float, components: Mapping[str, float] | None = None, turn: int | None = None
    ) -> int:
        """Assign a reward to the session, or to one of its turns; it replaces an earlier one. Also possible after the
        close.

        Returns the event's number. Needs the admin token or the run's, or a server with
        `TURNLOG_SESSION_REWARDS=allow`. Raises ValueError for a number that is not finite, NotFound, InvalidRequest (no
        such turn, more than 64 KiB), Forbidden.
        """
        body: Object = {"reward": _finite(reward)}
        if components is not None:
            body["components"] = {name: _finite(value) for name, value in components.items()}
        if turn is not None:
            body["turn"] = turn
        reply = await self._transport.read("PUT", f"{self._path}/reward", body=body, token=self._judges_token)
        seq: int = reply["seq"]
        return seq

    @overload
    async def annotate(
        self, name: str, value: ArrayLike, *, turn: int, over: Literal["output", "own"], writer: str | None = None
    ) -> int: ...

    @overload
    async def annotate(self, name: str, value: Any, *, turn: int | None = None, writer: str | None = None) -> int: ...

    async def annotate(
        self,
        name: str,
        value: Any,
        *,
        turn: int | None = None,
        over: Literal["output", "own"] | None = None,
        writer: str | None = None,
    ) -> int:
        """Annotate the session, or one of its turns; this replaces the annotation of the same name. Also
        possible after the close.

        value: what JSON has; or with `over` a column of `turn`, numbers of the shape (T,), one for each token that the
            turn sampled (`output`) or that is new in it (`own`). It becomes int32 or float32. A token that is masked in
            a numpy masked array has no number.
        writer: who wrote it.

        Returns the event's number. Needs the admin token or the run's. Raises ValueError for a column without a turn
        and for values that are not a column; NotFound, InvalidRequest (a column of another length, a number that is
        not finite, past a limit), Forbidden.
        """
        path = self._annotations(turn, name)
        if over is None:
            given = {"value": value, **present({"writer": writer})}
            reply = await self._transport.read("PUT", path, body=given)
        else:
            if turn is None:
                raise ValueError("a column requires a turn")
            file, parameters = (NPY, to_npy(value)), {"over": over, "writer": writer}
            reply = await self._transport.read("PUT", path, file=file, parameters=parameters, slow=True)
        seq: int = reply["seq"]
        return seq

    async def annotation(self, name: str, *, turn: int | None = None) -> Any:
        """The value under this name; a column as a numpy masked array (T,), masked where a token has no number.

        Raises NotFound.
        """
        path = self._annotations(turn, name)
        found = await self._transport.read("GET", path, token=self.token, slow=True)
        return to_array(found["values"], found["dtype"]) if "values" in found else found["value"]

    async def annotations(self, *, turn: int | None = None) -> list[ListedAnnotation]:
        """The annotations of the session and of all its turns, or of one turn, without content. Raises NotFound."""
        found = await self._transport.read("GET", self._annotations(turn), token=self.token)
        return cast(list[ListedAnnotation], found["annotations"])

    async def delete_annotation(self, name: str, *, turn: int | None = None, writer: str | None = None) -> None:
        """Remove an annotation, if there is one. Needs the admin token or the run's. Raises NotFound, Forbidden."""
        await self._transport.call("DELETE", self._annotations(turn, name), parameters={"writer": writer})

    def _annotations(self, turn: int | None, name: str | None = None) -> str:
        of = self._path if turn is None else f"{self._path}/turns/{turn}"
        return f"{of}/annotations" if name is None else f"{of}/annotations/{segment(name)}"

    async def get(self, records: Literal["full", "new", "none"] = "new") -> Records:
        """`session_id`, `records` (for each live turn its request as sent to the engine, and the engine's reply),
        `metadata` (the current state) and `session` (the arguments of its creation, note and tags).

        records: requests with the messages that are new in each, tools where they changed (null: none any more), and
            no prompts' ids; `full`: whole ones, which have the context once a turn; `none`.

        Raises NotFound, SessionClosed.
        """
        parameters = {"records": records}
        found = await self._transport.read("GET", self._path, parameters=parameters, token=self.token, slow=True)
        return cast(Records, found)

    async def state(self, seq: int | None = None) -> State:
        """The session after event `seq`, by default the last: turns with the times of their stages, failed turns,
        rollbacks, rewards, metadata; also of a closed or erased session. Raises NotFound."""
        found = await self._transport.read("GET", f"{self._path}/state", parameters={"seq": seq}, token=self.token)
        return cast(State, found)

    async def samples(
        self,
        max_seq_len: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        snapshot_id: str | None = None,
    ) -> Samples:
        """The training samples of an open session, cut to `max_seq_len` tokens.

        metadata: what the agent returned, in each sample's metadata; a `reward` in it is assigned to the session, as
            `set_reward` does.
        snapshot_id: of `finish`; only the samples of a session that is finished.

        Raises NotFound, SessionClosed, Conflict (another snapshot), InvalidRequest, Forbidden.
        """
        body: Object = {"max_seq_len": max_seq_len}
        if metadata is not None:
            body["metadata"] = metadata
        if snapshot_id is not None:
            body["snapshot_id"] = snapshot_id
        token = self.token if metadata is None else self._judges_token
        path = f"{self._path}/samples"
        return parse(await self._transport.call("POST", path, body=body, token=token, slow=True))

    async def finish(self, producer_finished: bool = True, *, timeout: float = 60.0) -> FinishedSession:
        """Let the session take no more turns, and wait for those in flight, at most `timeout` seconds. Idempotent.

        producer_finished: the agent came to its end; else the snapshot has no samples.

        Raises NotFound, SessionClosed, Conflict (finished with another `producer_finished`).
        """
        body: Object = {"producer_finished": producer_finished, "timeout": timeout}
        path = f"{self._path}/finish"
        return cast(FinishedSession, await self._transport.read("POST", path, body=body, token=self.token, slow=True))

    async def tree(self, **parameters: Unpack[TreeParameters]) -> Tree:
        """The turns as a tree: `turns`, `branches`, and which rows of an export with these `branches` (`kept`, `main`,
        `longest`, `all`) and `loss` (`once`, `every`) have each turn in their loss; also of a closed session. Raises
        NotFound; TypeError and ValueError for an invalid parameter."""
        given = checked(TreeParameters, parameters)
        return cast(Tree, await self._transport.read("GET", f"{self._path}/tree", parameters=given, token=self.token))

    def events(self, after: int = 0, *, follow: bool = False) -> AsyncIterator[Event]:
        """The events after number `after`; with `follow` also new ones, until the session is erased.

        A broken connection causes no gap and no repetition. Raises NotFound.
        """
        lines = self._transport.lines(f"{self._path}/events", EventsPlace(after, follow), self.token)
        return cast(AsyncIterator[Event], lines)

    async def fork(
        self,
        turn: int,
        *,
        count: int = 1,
        group_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        parent_loss: bool = False,
        key: str | None = None,
    ) -> list[AsyncSession]:
        """Create sessions that begin after committed turn `turn`, also of a closed session.

        Arguments that are None are taken from this session. Its turns are in the new sessions' loss only with
        `parent_loss`. The same `key` returns the same sessions again, also in another process; without a key each
        call creates new ones. Needs the admin token or the run's. Raises NotFound, SessionClosed (this session is
        erased), Conflict (a fork of this key was closed), InvalidRequest (also for a key that was used with other
        arguments), Forbidden.
        """
        given: Object = {
            "turn": turn,
            "count": count,
            "group_id": group_id,
            "metadata": None if metadata is None else dict(metadata),
            "parent_loss": parent_loss,
        }
        made = await self._transport.read(
            "POST", f"{self._path}/fork", body=present(given), key=key or uuid.uuid4().hex, slow=True
        )
        return [
            AsyncSession(self._transport, fork["session_id"], fork.get("token"), fork.get("url"))
            for fork in made["sessions"]
        ]

    async def close(self, *, failed: Failure | None = None) -> None:
        """Close the session; a turn in flight is aborted. Idempotent: the first close stands.

        failed: why the rollout failed, if it did for a reason that is no reward; a later reward ends that. Needs the
            admin token or the run's, or a server with `TURNLOG_SESSION_REWARDS=allow`.

        Raises NotFound, Forbidden, InvalidRequest; TypeError and ValueError for another kind, before anything is sent.
        """
        try:
            if failed is None:
                await self._transport.call("DELETE", self._path, token=self.token)
            else:
                body = {"failed": checked(Failure, failed)}
                await self._transport.call("POST", f"{self._path}/close", body=body, token=self._judges_token)
        except SessionClosed:
            return

    async def erase(self) -> bool:
        """Close the session and delete its content for good. False: object storage or archives still have some of it,
        and the server continues. Needs the admin token or the run's, or a server with `TURNLOG_SESSION_REWARDS=allow`.
        Raises NotFound, Forbidden."""
        return await self._transport.erase(self._path, token=self._judges_token)

    @property
    def _judges_token(self) -> str | None:
        """The client's own token, if it has one: the session's may set no reward, fail no rollout and erase nothing."""
        return self._transport.token or self.token

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _finite(number: float) -> float:
    """A finite number, also from a numpy scalar or a one-element tensor. Raises ValueError."""
    found = float(number)
    if not math.isfinite(found):
        raise ValueError(f"a reward must be finite, not {found}")
    return found
