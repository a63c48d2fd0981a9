"""Which engine comes first, and what becomes of one that cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from app.domain.fleet import EngineListed
from app.errors import NoUpstream, UpstreamInvalid, UpstreamUnreachable
from app.fleet.engines import EngineOrder, Engines
from app.upstream.client import EngineClient, Withheld
from app.upstream.streams import ReplyStream
from ops.server import reserve_port

pytestmark = pytest.mark.anyio

A, B, C = "http://a", "http://b", "http://c"
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 20)
    yield made
    await made.close()


async def nothing(engine: str) -> bytes:
    """A request's body, the same for each engine."""
    return b"{}"


class Listening:
    """An engine of a few lines, which notes what it is asked. It answers when `go` is set, or hangs up at once."""

    def __init__(self, *, hangs_up: bool = False) -> None:
        self.asked: list[bytes] = []
        self.heard = asyncio.Event()
        self.go = asyncio.Event()
        self.url = ""
        self.replies: list[bytes] = []
        self._hangs_up = hangs_up

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self.asked.append(head.split(b" ")[1] + b" " + await reader.readexactly(size))
            self.heard.set()
            if not self._hangs_up:
                await self.go.wait()
                writer.write(self.replies.pop(0) if self.replies else REPLY)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def listening(*, hangs_up: bool = False) -> AsyncIterator[Listening]:
    engine = Listening(hangs_up=hangs_up)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        engine.go.set()
        server.close()


def over(client: EngineClient, *urls: str, placement: str = "least_loaded") -> Engines:
    made = Engines(client, placement)  # type: ignore[arg-type]
    made.serve([EngineListed(url) for url in urls])
    return made


async def test_equally_loaded_engines_are_shared_out_by_the_sessions_names(client: EngineClient) -> None:
    engines, reversed_ = over(client, A, B, C), over(client, C, B, A)
    first = Counter(engines.order(None, f"s{number}").first for number in range(600))
    assert min(first[url] for url in (A, B, C)) > 150
    names = [f"s{number}" for number in range(50)]
    assert all(list(engines.order(None, name)) == list(reversed_.order(None, name)) for name in names)


async def test_a_hash_looks_at_no_load_and_moves_only_what_it_must(client: EngineClient) -> None:
    engines = over(client, A, B, C, placement="hash")
    before = {name: list(engines.order(None, name)) for name in map(str, range(200))}
    engines.members[A].in_flight = 100
    engines.members[B].health = "busy"
    assert before == {name: list(engines.order(None, name)) for name in before}
    engines.serve([EngineListed(A), EngineListed(C)])
    assert all(list(engines.order(None, name)) == [url for url in order if url != B] for name, order in before.items())


async def test_the_engine_with_the_prefix_comes_first(client: EngineClient) -> None:
    engines = over(client, A, B, C)
    engines.members[C].in_flight = 50
    assert engines.order(None, "s", C).first == C
    assert list(engines.order(None, "s", "http://elsewhere")) == list(engines.order(None, "s"))
    assert list(over(client, A).order(None, "s", A)) == [A]


async def test_slow_engines_get_new_sessions_last_but_keep_theirs(client: EngineClient) -> None:
    engines = over(client, A, B, C)
    engines.members[A].health, engines.members[B].health = "busy", "paused"
    engines.members[C].in_flight = 9
    assert engines.order(None, "s").first == C
    assert engines.order(None, "s", B).first == B
    assert engines.why_unavailable(A, None) is engines.why_unavailable(B, None) is None


async def test_draining_and_dead_engines_come_last_but_come(client: EngineClient) -> None:
    engines = over(client, A, B, C)
    engines.serve([EngineListed(A), EngineListed(B, "draining"), EngineListed(C)])
    engines.members[A].health = "dead"
    engines.members[C].in_flight = 50
    assert [list(engines.order(None, "s", first)) for first in (None, A, B)] == [[C, B, A]] * 3
    assert [engines.why_unavailable(url, None) for url in (A, B, C, "http://d")] == ["dead", "draining", None, "listed"]


async def test_without_an_engine_there_is_no_order(client: EngineClient) -> None:
    with pytest.raises(NoUpstream):
        over(client).order(None, "s")


async def test_what_is_known_of_an_engine_outlives_a_change_of_the_list(client: EngineClient) -> None:
    engines = over(client, A, B)
    engines.members[A].health = "dead"
    engines.serve([EngineListed(A), EngineListed(C)])
    assert engines.members[A].health == "dead"
    engines.serve([EngineListed(C)])
    engines.serve([EngineListed(A), EngineListed(C)])
    assert engines.members[A].health == "unknown"


def in_order(*urls: str) -> EngineOrder:
    return EngineOrder(None, urls[0], lambda: urls, lambda url, run: True)


async def asked(engines: Engines, *order: str, rid: str = "", version: str | None = None) -> str:
    answer = await engines.generate(in_order(*order), "chat", nothing, [], lambda size: None, rid=rid, version=version)
    return answer.engine


async def test_a_lost_connection_goes_nowhere_else(client: EngineClient) -> None:
    """The engine may be generating."""
    async with listening(hangs_up=True) as first, listening() as second:
        engines = over(client, first.url, second.url)
        with pytest.raises(UpstreamUnreachable):
            await asked(engines, first.url, second.url)
    assert [(one.url, one.is_refusing) for one in engines.members.values() if one.needs_check] == [(first.url, False)]
    assert second.asked == []


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: %b\n\n"


@pytest.mark.parametrize(
    ("event", "error", "asked"),
    [
        (b'{"choices":[{"delta":{},"token_ids":[%b1]}]}' % (b"1," * 16), UpstreamInvalid, 2),
        (b'{"choices":[{"delta":{},"token_ids":[%b1]}]}' % (b"1," * 15), UpstreamUnreachable, 1),
        (b'{"error":{"code":500}}', UpstreamUnreachable, 1),
    ],
)
async def test_an_engine_whose_stream_is_left_is_told_to_abort(
    client: EngineClient, event: bytes, error: type[Exception], asked: int
) -> None:
    """It goes on past the limit; a stream that it ended itself needs no word."""
    async with listening() as engine:
        engine.replies, engines = [EVENTS % event], over(client, engine.url)
        engine.go.set()
        opened = {"rid": "r", "open_stream": lambda *_: ReplyStream(limit=0)}
        with pytest.raises(error):
            await engines.generate(in_order(engine.url), "chat", nothing, [], lambda size: None, **opened)
    paths = [one.decode().partition(" ")[0] for one in engine.asked]
    assert paths == ["/v1/chat/completions", "/abort_request"][:asked]


async def test_a_cancelled_connect_is_not_remembered(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was sent, so no abort follows that would forget it."""
    connecting = asyncio.Event()

    async def hangs(origin: object) -> None:
        connecting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client._connections, "connect", hangs)
    engines = over(client, A)
    turn = asyncio.create_task(asked(engines, A, rid="turnlog-1"))
    await connecting.wait()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert engines.engine_of("turnlog-1") is None


async def test_what_may_not_be_sent_any_more_when_a_connection_is_there_is_not(client: EngineClient) -> None:
    """To connect may take seconds: the question is asked behind that, for each engine."""
    async with listening() as engine:
        said: list[bool] = []
        nobody = f"http://127.0.0.1:{reserve_port(engine)}"

        def no() -> bool:
            said.append(True)
            return False

        with pytest.raises(Withheld):
            await over(client, engine.url).generate(
                in_order(nobody, engine.url), "chat", nothing, [], lambda size: None, may_send=no
            )
        assert said == [True], "not of the engine that cannot be connected to"
        assert engine.asked == []


async def test_the_engines_dialect_is_known_once_all_speak_the_same(client: EngineClient) -> None:
    engines = over(client, A, "http://b")
    found = [engines.dialect]
    for url, dialect in ((A, "sglang"), ("http://b", "vllm"), ("http://b", "sglang")):
        engines.seen(url, None, None, dialect)  # type: ignore[arg-type]
        found.append(engines.dialect)
    engines.members[A].is_refusing = True
    engines.members[A].answered()
    assert [*found, engines.dialect] == ["auto", "auto", "auto", "sglang", "auto"]


async def test_an_abort_goes_to_the_engine_that_has_the_generation(client: EngineClient) -> None:
    async with listening() as working, listening() as other:
        other.go.set()
        engines = over(client, working.url, other.url)
        turn = asyncio.create_task(asked(engines, working.url, rid="turnlog-1"))
        await working.heard.wait()
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        working.go.set()
        await engines.abort("turnlog-1", None)
        assert working.asked[1:] == [b'/abort_request {"rid":"turnlog-1","abort_all":false}']
        assert other.asked == []
        await engines.abort("turnlog-1", None)
        assert [len(working.asked), len(other.asked)] == [3, 1]


async def test_a_version_that_falls_is_told_each_time_it_is_seen(client: EngineClient) -> None:
    engines = over(client, A)
    told: list[bool] = []
    for url, version, known in ((A, "5", None), (A, "4", "5"), (A, "4", "4"), (A, "5", "4"), ("http://b", "1", None)):
        engines.seen(url, version, known, "sglang")
        told.append(engines.regression.is_set())
        engines.regression.clear()
    assert told == [False, True, True, False, False]
    assert engines.members[A].dialect == "sglang"


async def test_a_refused_connection_goes_on_to_the_next_engine(client: EngineClient) -> None:
    holder = Listening()
    gone = f"http://127.0.0.1:{reserve_port(holder)}"
    async with listening() as engine:
        engine.go.set()
        engines = over(client, gone, engine.url)
        engines.changed.clear()
        assert await asked(engines, gone, engine.url) == engine.url
        assert engines.changed.is_set()
        assert [(one.url, one.is_refusing) for one in engines.members.values() if one.needs_check] == [(gone, True)]
        with pytest.raises(UpstreamUnreachable):
            await asked(engines, gone)
    assert [member.in_flight for member in engines.members.values()] == [0, 0]


async def test_load_is_what_is_in_flight_now(client: EngineClient) -> None:
    async with listening() as engine:
        engines = over(client, engine.url)
        turn = asyncio.create_task(asked(engines, engine.url))
        await engine.heard.wait()
        assert engines.members[engine.url].in_flight == 1
        engine.go.set()
        await turn
        assert engines.members[engine.url].in_flight == 0
