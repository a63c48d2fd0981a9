"""Which engine serves a session, and which error a client gets when an engine fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from app.domain.events import EngineShape, is_number
from app.domain.fleet import EngineListed, EngineVersions
from app.domain.request import IdsField
from app.errors import AppError, NoUpstream, UpstreamInvalid, UpstreamTimeout, UpstreamUnreachable
from app.fleet.member import ROUTES, Member, WeightVersions
from app.upstream.client import ONCE, EngineClient, EngineReply, Grow, TooLarge, Unreadable
from app.upstream.dialects import DialectChoice
from app.upstream.headers import Headers, to_control, with_request_id
from app.upstream.http import EngineError, Lost, NotSent, TimedOut
from app.upstream.inference import Offer
from app.upstream.inference import probe as probe_offer
from app.upstream.streams import UNREADABLE, BadStream, CutStream, StreamReader
from app.upstream.token_in import ProbeRefused, probe
from workers.reply import Dialect, LogprobsOf

log = logging.getLogger("turnlog.engines")

PATHS: Mapping[EngineShape, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""The engines' routes for generation."""

MODELS = "/v1/models"
COUNT_TOKENS = "/v1/messages/count_tokens"
ABORT_TIMEOUT_S = 2.0

UNUSABLE = (Lost, TimedOut, TooLarge, Unreadable, BadStream)
"""What an engine may do that was asked."""


T = TypeVar("T")


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


_MODELS = msgspec.json.Decoder(_Models)


class EngineOrder:
    """The engines that a turn of `run` (None: of any) tries, in order: `first`, then the others, ranked only when that
    fails.

    `may_serve`: may an engine serve the run? It is asked again before a request is sent, since a turn may have waited
    long for that.
    """

    def __init__(self, run: str | None, first: str, others: Callable[[], Iterable[str]], may_serve: Serves) -> None:
        self.run = run
        self.first = first
        self._others = others
        self._may_serve = may_serve

    def __iter__(self) -> Iterator[str]:
        if self.may_serve(self.first):
            yield self.first
        yield from (url for url in self._others() if url != self.first)

    def may_serve(self, url: str) -> bool:
        return self._may_serve(url, self.run)


Serves = Callable[[str, str | None], bool]
"""May the engine with this base URL serve this run?"""

BodyFor = Callable[[str], Awaitable[Sequence[bytes | memoryview]]]
"""A request's body, in parts, for the engine with this base URL: a turn may move to another engine, which reads other
fields.

May raise EngineError, ProbeRefused, and AppError if the engine cannot get the request.
"""

OpenStream = Callable[[str, str | None, LogprobsOf | None], StreamReader]
"""Makes the reader of a reply that is a stream, from the engine's base URL and the weight version known of it."""


class Engines:
    """The engines, and which of them a turn should try.

    `placement`: a session without an engine gets the least loaded one (`least_loaded`), or one chosen by its id alone
    (`hash`, also used between equal loads). `changed` is set when the set of engines has changed or one needs a health
    check; `regression` when one has a lower weight version than before. `versions` finds out an engine's weight version
    when a generation is sent to it; without, the newest that the engine reported counts. `configured` is the operator's
    setting of the dialect. `logprobs_of` is what the logprobs of an engine are of that does not say it.
    """

    def __init__(
        self,
        client: EngineClient,
        placement: Literal["least_loaded", "hash"] = "least_loaded",
        api_key: str | None = None,
        versions: WeightVersions | None = None,
        configured: DialectChoice = "auto",
        logprobs_of: LogprobsOf | None = None,
    ) -> None:
        self.members: dict[str, Member] = {}
        self._logprobs_of = logprobs_of
        self._client = client
        self._versions = versions
        self._configured = configured
        self._placement = placement
        self._headers = to_control(api_key)
        self._shared: list[Member] = []
        self._own: dict[str, list[Member]] = {}
        self._generating: dict[str, str] = {}
        self._probes: dict[str, asyncio.Task[Any]] = {}
        self.changed = asyncio.Event()
        self.regression = asyncio.Event()

    def serve(self, listed: Sequence[EngineListed], owners: Iterable[str] = ()) -> None:
        """Use these engines from now on; what is known of those that stay is kept. Runs that are `owners` go to their
        own alone, though they have none just now."""
        before = self.members
        self.members = {engine.url: before.get(engine.url) or Member(engine.url) for engine in listed}
        for engine in listed:
            member = self.members[engine.url]
            member.is_draining, member.run = engine.state == "draining", engine.run
        members = list(self.members.values())
        self._shared = [member for member in members if member.run is None]
        self._own = {run: [member for member in members if member.run == run] for run in owners}
        self.changed.set()

    def seen(self, url: str, version: str | None, known: str | None, dialect: Dialect | None = None) -> None:
        """Record what an engine reported of itself; `known` as in `EngineReply`."""
        member = self.members.get(url)
        if member is None:
            return
        if dialect is not None and dialect != "openai":
            member.dialect = dialect
        if version is not None and version != member.weight_version:
            member.report_version(version, known)
        if member.fell_from is not None:
            self.regression.set()

    def warn_of_aborts(self, url: str) -> None:
        """Warn, once per engine, that it aborted a generation that cannot be continued."""
        member = self.members.get(url)
        if member is not None and not member.has_aborted:
            member.has_aborted = True
            log.warning("%s aborted a generation that cannot be continued (docs/fleet.md)", url)

    @property
    def dialect(self) -> DialectChoice:
        """The dialect of all engines: the operator's, else what they speak; `auto` if one is not known yet, or if they
        differ."""
        if self._configured != "auto":
            return self._configured
        dialects = {member.dialect for member in self.members.values()}
        return (dialects.pop() if len(dialects) == 1 else None) or "auto"

    def logprobs_of(self, member: Member) -> LogprobsOf | None:
        """Which distribution the engine's logprobs are of: what it says, else what the operator says."""
        return member.logprobs_of or self._logprobs_of

    def known(self, url: str) -> Member:
        """What is known of an engine, also of one that was removed."""
        return self.members.get(url) or Member(url)

    def serving(self, run: str | None) -> Sequence[Member]:
        """The engines that serve a run: its own, else those that serve no run alone. None: all engines."""
        return list(self.members.values()) if run is None else self._own.get(run, self._shared)

    def newest_versions(self) -> EngineVersions:
        """What is current at engines. Also for a read's thread."""

        def newest(members: Sequence[Member]) -> int | None:
            versions = [member.weight_version for member in members]
            return max((int(one) for one in versions if one is not None and is_number(one)), default=None)

        return EngineVersions({run: newest(members) for run, members in self._own.items()}, newest(self._shared))

    def may_serve(self, url: str, run: str | None) -> bool:
        """Is there this engine, and does it serve the run?"""
        member = self.members.get(url)
        return member is not None and (run is None or member.run == (run if run in self._own else None))

    def require_some(self, run: str | None) -> None:
        """Raises NoUpstream."""
        if not self.serving(run):
            if run is not None and run in self._own:
                raise NoUpstream(f"run {run} has no engines left, and may not use others: add one with POST /engines")
            whose = "" if not self.members else f" for run {run}: each serves another run alone"
            raise NoUpstream(f"no engine is available{whose}: set TURNLOG_UPSTREAMS, or add one with POST /engines")

    def why_unavailable(self, url: str, run: str | None) -> Literal["listed", "draining", "dead"] | None:
        """Why no turn of this run should go to this engine; None if one may."""
        if not self.may_serve(url, run):
            return "listed"
        member = self.members[url]
        if member.is_draining:
            return "draining"
        return "dead" if member.health == "dead" else None

    def order(self, run: str | None, session_id: str, preferred: str | None = None) -> EngineOrder:
        """The engines in the order in which a turn of this run (None: of any) tries them, beginning with `preferred` if
        it accepts turns.

        Draining and dead engines come last, rather than none. Raises NoUpstream.
        """
        if preferred is None or self.why_unavailable(preferred, run) is not None:
            preferred = self._ranked(run, session_id)[0]
        return EngineOrder(run, preferred, lambda: self._ranked(run, session_id), self.may_serve)

    def _ranked(self, run: str | None, session_id: str) -> list[str]:
        """Available engines, then draining, then dead ones; each group by load, then by rendezvous hashing.

        Only the hashing is the same in all processes. An engine that answers slowly has more load than this process
        knows. Raises NoUpstream.
        """
        members = self.serving(run)
        if len(members) < 2:
            self.require_some(run)
            return [member.url for member in members]
        by_load = self._placement == "least_loaded"

        def rank(member: Member) -> tuple[bool, bool, bool, int, bytes]:
            name = hashlib.sha256(f"{member.url} {session_id}".encode()).digest()
            is_slow = by_load and member.health in ("busy", "paused")
            load = member.in_flight if by_load else 0
            return member.health == "dead", member.is_draining, is_slow, load, name

        return [member.url for member in sorted(members, key=rank)]

    async def generate(
        self,
        order: EngineOrder,
        shape: EngineShape,
        body_for: BodyFor,
        headers: Headers,
        grow: Grow,
        *,
        rid: str = "",
        version: str | None = None,
        may_send: Callable[[], bool] | None = None,
        open_stream: OpenStream | None = None,
        path: Callable[[], str] | None = None,
    ) -> EngineReply:
        """Send a generation to the first engine that can be connected to; its answer, whatever its status.

        `grow` reserves memory for its bytes. `rid` is the id to abort it by; if this call is cancelled once it was
        sent, `abort` it. `version` is the adapter's weight version, if known. `open_stream` is for a reply that the
        engine streams; the answer is the whole reply all the same. `path` is the route for the body that was made last,
        if not the shape's.

        Raises as `body_for`, UpstreamUnreachable, UpstreamTimeout, UpstreamInvalid (malformed, too large, a redirect or
        another status that holds no completion), NoUpstream, Withheld if `may_send` refuses at the last moment or the
        engine does not serve the run any more.
        """
        tried, url, is_cancelled = 0, "", False

        def sends() -> bool:
            if not order.may_serve(url) or (may_send is not None and not may_send()):
                return False
            if rid:
                self._generating[rid] = url
            return True

        try:
            for url in order:
                tried += 1
                member = self.members.get(url) or Member(url)
                known = member.weight_version
                dispatched = None
                member.in_flight += 1
                try:
                    body = await body_for(url)
                    dialect = self._configured if member.dialect is None else member.dialect
                    dispatched = version
                    if version is None:
                        dispatched = await self._dispatched(url, order.run, known, open_stream is not None)
                    sent = headers
                    if rid and dialect != "sglang":
                        sent = with_request_id(sent, rid)
                    if not member.echoes_ids:
                        sent = [*sent, ONCE]
                    stream = None
                    if open_stream is not None:
                        stream = open_stream(url, dispatched, member.logprobs_of or self._logprobs_of)
                    route = PATHS[shape] if path is None else path()
                    reply = await self._client.post(url + route, body, sent, grow, sends, stream)
                except NotSent as error:
                    self._refused(member, error)
                    continue
                except ProbeRefused as refused:
                    reply = msgspec.structs.replace(refused.reply)
                except UNUSABLE as error:
                    if rid and isinstance(error, BadStream) and not isinstance(error, CutStream):
                        await self.abort(rid, order.run)  # It may generate on: its stream was left, not ended.
                    raise self._told(member, error) from error
                finally:
                    member.in_flight -= 1
                if member.is_refusing:
                    member.answered()
                reply.engine, reply.dispatched, reply.known = url, dispatched, known
                reply.logprobs_of = member.logprobs_of or self._logprobs_of
                if reply.status != 200:
                    require_status(url, reply.status)
                return reply
            raise UpstreamUnreachable(f"none of {tried} engines can be connected to")
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            # A cancelled one that was sent stays, for `abort` to find.
            if not is_cancelled:
                self._generating.pop(rid, None)

    async def _dispatched(self, url: str, run: str | None, known: str | None, is_stream: bool) -> str | None:
        """The weight version of what a run sends to this engine now; None if it is not known."""
        if self._versions is None:
            return known
        member = self.members.get(url)
        if member is None:
            return None
        dialect = self._dialect_of(url)
        names_none = dialect == "vllm" or (is_stream and dialect == "sglang")
        return await self._versions.at_dispatch(member, run, self.seen, ROUTES[dialect] if names_none else None)

    def _dialect_of(self, url: str) -> DialectChoice:
        """The dialect of one engine; `auto` while it is not known."""
        member = self.members.get(url)
        return self._configured if member is None or member.dialect is None else member.dialect

    async def ids_field(self, url: str, model: bytes | None) -> IdsField | None:
        """The field of a chat's body that the engine takes a prompt's ids from; None if it takes none.

        The engine is asked once, and again after a restart. `model` is the asking turn's, as raw JSON. Raises
        EngineError, ProbeRefused, UpstreamInvalid.
        """
        member = self.known(url)
        if member.token_ids is None or member.is_refusing:
            return await self._once(f"{url} ids", partial(self._probe, member, model))
        return None if member.token_ids == "none" else member.token_ids

    async def _once(self, key: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What several turns may ask an engine at the same time."""
        running = self._probes.get(key)
        if running is None:
            running = self._probes[key] = asyncio.create_task(ask(), name="turnlog-probe")

            def ended(task: asyncio.Task[Any]) -> None:
                del self._probes[key]
                if not task.cancelled():
                    task.exception()  # Marks it as retrieved: a cancelled turn does not read it.

            running.add_done_callback(ended)
        # Others may wait for it too: it goes on if this turn is cancelled.
        found: T = await asyncio.shield(running)
        return found

    async def _probe(self, member: Member, model: bytes | None) -> IdsField | None:
        field = await probe(self._client, member.url + PATHS["chat"], self._headers, model)
        if member.is_refusing:
            member.answered()
        member.token_ids = field or "none"
        if field is not None and member.dialect is None:
            member.dialect = "sglang" if field == "input_ids" else "vllm"
        if field is None:
            log.warning("%s does not accept token ids in chats: its turns are only captured (docs/tito.md)", member.url)
        return field

    async def offer(self, url: str) -> Offer | None:
        """vLLM's route for prompts of ids, if the engine has it; asked once, and again after a restart or where it gave
        no usable answer. Raises NotSent."""
        if self._dialect_of(url) == "sglang":
            return None
        member = self.known(url)
        if member.offer is None or member.is_refusing:
            return await self._once(f"{url} offer", partial(self._probe_offer, member))
        return None if member.offer == "none" else member.offer

    async def _probe_offer(self, member: Member) -> Offer | None:
        try:
            offer = await probe_offer(self._client, member.url, self._headers)
        except (Lost, TimedOut, TooLarge, Unreadable):
            return None  # The turn itself is told what is wrong.
        if member.is_refusing:
            member.answered()
        member.offer = offer
        if not isinstance(offer, Offer):
            return None
        member.dialect = member.dialect or "vllm"
        return offer

    async def context(self, url: str) -> int | None:
        """The tokens that prompt and output may have together, asked once until a restart; None if the engine does not
        say it. Raises EngineError."""
        member = self.known(url)
        if member.context is None or member.is_refusing:
            reply = await self._client.get(url + MODELS, self._headers)
            with contextlib.suppress(*UNREADABLE):
                models = _MODELS.decode(reply.body.joined()).data if reply.status == 200 else []
                member.context = next((one.max_model_len for one in models if one.max_model_len is not None), None)
        return member.context

    def takes_no_ids(self, url: str) -> bool:
        """Is it known that the engine's chat takes no token ids?"""
        member = self.members.get(url)
        return member is not None and member.token_ids == "none"

    def forget_ids_field(self, url: str) -> None:
        """The engine did not take its prompt from the ids that it was sent: ask it again."""
        member = self.members.get(url)
        if member is not None:
            member.token_ids = member.offer = None

    async def models(self, run: str | None, session_id: str, headers: Headers) -> EngineReply:
        """GET /v1/models. Raises as `generate`."""
        order = self.order(run, session_id)
        return await self.first_reached(order, lambda url: self._client.get(url + MODELS, headers))

    async def count_tokens(self, run: str | None, session_id: str, body: bytes, headers: Headers) -> EngineReply:
        """POST /v1/messages/count_tokens, which not every engine has. Raises as `generate`."""
        order = self.order(run, session_id)
        return await self.first_reached(order, lambda url: self._client.post(url + COUNT_TOKENS, body, headers))

    async def first_reached(self, order: Iterable[str], ask: Callable[[str], Awaitable[EngineReply]]) -> EngineReply:
        """What the first engine answers that can be connected to. Raises as `generate`."""
        tried = 0
        for url in order:
            tried += 1
            member = self.known(url)
            member.in_flight += 1
            try:
                reply = await ask(url)
            except NotSent as error:
                self._refused(member, error)
                continue
            except UNUSABLE as error:
                raise self._told(member, error) from error
            finally:
                member.in_flight -= 1
            if member.is_refusing:
                member.answered()
            require_status(url, reply.status)
            return reply
        raise UpstreamUnreachable(f"none of {tried} engines can be connected to")

    def _refused(self, member: Member, error: NotSent) -> None:
        member.refused(str(error), time.time())
        self._needs_check(member)

    def _told(self, member: Member, error: Exception) -> AppError:
        """What the client is told when an engine was asked and gave no usable answer."""
        if isinstance(error, Lost | CutStream):
            self._needs_check(member)
        return failure(member.url, error)

    def _needs_check(self, member: Member) -> None:
        """A turn found that the engine refuses connections or closes them."""
        if member.health != "dead":
            member.needs_check = True
            self.changed.set()

    def engine_of(self, rid: str) -> str | None:
        """The engine that runs a generation of this process; None for an unknown rid."""
        return self._generating.get(rid)

    async def abort(self, rid: str, run: str | None) -> None:
        """Ask the engine that has the generation to abort it, or all that serve its run if it is not known.

        vLLM, and an engine that cannot be reached, notice the closed connection.
        """
        body = msgspec.json.encode({"rid": rid, "abort_all": False})
        running = self._generating.pop(rid, None)
        may_run = [running] if running else [member.url for member in self.serving(run)]
        asked = [url for url in may_run if self._dialect_of(url) != "vllm"]
        await asyncio.gather(*(self._abort(url, body) for url in asked))

    async def _abort(self, base_url: str, body: bytes) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._client.post(base_url + "/abort_request", body, self._headers)
        except (EngineError, TimeoutError) as error:
            log.info("%s could not be asked to abort a generation: %s", base_url, error)


def failure(name: str, error: Exception) -> AppError:
    """What the client is told where one of UNUSABLE came from an engine or an upstream."""
    if isinstance(error, Lost):
        return UpstreamUnreachable(f"{name} ended the connection ({error})")
    if isinstance(error, TimedOut):
        return UpstreamTimeout(f"{name} did not answer in time")
    if isinstance(error, CutStream):
        return UpstreamUnreachable(f"{name} ended its stream early: {error}")
    if isinstance(error, TooLarge):
        return UpstreamInvalid(f"the reply of {name} is too large: {error}")
    return UpstreamInvalid(f"{name} returned a malformed reply: {error}")


def require_status(url: str, status: int) -> None:
    """Raises UpstreamInvalid for a status that no engine should send."""
    if not 200 <= status < 600:
        raise UpstreamInvalid(f"{url} answered {status}, which is not a valid status")
    if 300 <= status < 400:
        raise UpstreamInvalid(f"{url} answered with a redirect ({status}), which is not followed")
    if 200 < status < 300:
        raise UpstreamInvalid(f"{url} answered {status} without a completion")
