"""What preparing a turn costs as its history grows: token-in beside rendering and encoding all of it again."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from app.domain import decide
from app.domain.history import Incoming
from app.domain.request import ChatRequest, join_object, parse_chat
from app.domain.session import Session
from app.sessions.cache import CacheEntry, SessionCache
from app.settings import Settings
from app.store.engine import Database
from app.store.writer import Writer
from app.tito.prompts import Prompts
from app.turn.context import ClaimedTurn
from app.turn.engine_request import EngineRequestOptions, engine_request
from app.turn.token_in import TAIL, TokenIn
from app.upstream.dialects import complete
from ops.bench.client import Connection
from ops.bench.latency import timed
from ops.bench.load import SIM, opening_messages, reply_message
from ops.bench.measure import cpu_s, keep, table
from ops.bench.stand import cores, folder_for_bench, pinned, simulator
from ops.bench.stored import StoredTurn, write_sessions
from ops.server import ServerProcess
from ops.simulator import tokenizer_files
from ops.tito_check import tokenizers
from workers.codec import Facts, Wire

LENGTHS = (1_000, 10_000, 34_000, 100_000)
"""Tokens of history; 34,000 is where others have published figures."""

MESSAGE_BYTES = 1_200
"""Of a question and of an answer: about 250 tokens of the simulator's vocabulary each."""

END = "<|im_end|>"
FRONT = b'{"model":"simulator","sim":' + SIM + b',"messages":['
FAMILIES = ("simulator", "qwen3")
SETTINGS = ("token-in", "capture")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of history")
    parser.add_argument("--repeat", type=int, default=100, help="preparations of each length; the median is shown")
    parser.add_argument("--renders", type=int, default=15, help="full renderings of each length")
    parser.add_argument("--sessions", type=int, default=8, help="of each length, for the server's CPU a turn")
    parser.add_argument("--turns", type=int, default=10, help="of each such session")
    parser.add_argument("--folder", type=Path, help="where the databases are put")


async def main(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as made:
        families = [family for family in FAMILIES if family == "simulator" or tokenizers.template("qwen3") is not None]
        for family in families:
            folder = _tokenizer_folder(Path(made), family)
            histories = [History.of(folder, family, length) for length in arguments.lengths]
            found = [await _in_process(arguments, history) for history in histories]
            if family == "simulator":
                served = await _served(arguments, folder, histories)
                found = [{**row, **server} for row, server in zip(found, served, strict=True)]
            else:
                found = [{**row, **dict.fromkeys(served[0])} for row in found]
            rows += [{"tokenizer": family, **row} for row in found]
    table(rows)
    print(f"written to {keep('prepare', rows)}")
    return 0


class WrongIds(Exception):
    """A prompt's ids are not those of rendering the whole conversation; the figures would mean nothing."""


class History(NamedTuple):
    """A conversation of at least the wanted tokens, as turns, and the question that follows it."""

    tokenizer: Any
    prompts: Prompts
    turns: list[StoredTurn]
    messages: list[bytes]
    question: bytes

    @classmethod
    def of(cls, folder: Path, family: str, tokens: int) -> History:
        """Turns of about 500 tokens, the prompts made as Turnlog makes them."""
        tokenizer = tokenizers.load(folder)
        prompts = Prompts.load(str(folder), "auto" if family == "simulator" else tokenizers.row(family))
        turns: list[StoredTurn] = []
        messages: list[bytes] = []
        tail: list[int] = []
        held = 0
        while held < tokens:
            seed = 2 * len(turns)
            question, answer = (_message(role, seed + one) for one, role in enumerate(("user", "assistant")))
            new = [msgspec.json.decode(question)]
            suffix = prompts.after(tail, new, None, {}).ids if turns else prompts.first(new, None, {})
            text = msgspec.json.decode(answer)["content"] + END
            output = array("i", tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
            facts = Facts(suffix.tobytes(), output.tobytes(), bytes(8 * len(output)))
            reply = b'{"choices":[{"message":' + answer + b"}]}"
            turns.append(StoredTurn.of(facts, Wire([question], answer, reply, [])))
            messages += [question, answer]
            tail = list(output[-TAIL:])
            held += len(suffix) + len(output)
        return cls(tokenizer, prompts, turns, messages, b'{"role":"user","content":"And then?"}')

    @property
    def tokens(self) -> int:
        return sum(turn.suffix_tokens + turn.output_tokens for turn in self.turns)

    def body(self) -> bytes:
        return FRONT + b",".join((*self.messages, self.question)) + b"]}"

    def rendered(self, messages: Sequence[bytes]) -> list[int]:
        """All of the messages by the tokenizer's own method, as those do it who keep no ids."""
        return self._render([msgspec.json.decode(message) for message in messages])

    def _render(self, messages: Sequence[Any]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def render_ms(self, repeat: int) -> float:
        """CPU of rendering and encoding the next prompt as a whole; the messages are decoded already."""
        messages = [msgspec.json.decode(message) for message in (*self.messages, self.question)]
        return statistics.median(_cpu_ms(lambda: self._render(messages)) for _ in range(repeat))


def _message(role: str, seed: int) -> bytes:
    content = msgspec.json.decode(opening_messages(MESSAGE_BYTES, seed)[0])["content"]
    return msgspec.json.encode({"role": role, "content": content.strip()})


def _tokenizer_folder(folder: Path, family: str) -> Path:
    if family != "simulator":
        return tokenizers.save(folder, family)
    tokenizer_files.write(folder / family)
    return folder / family


def _cpu_ms(work: Callable[[], object]) -> float:
    """Of all threads of this process."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


async def _in_process(arguments: argparse.Namespace, history: History) -> dict[str, Any]:
    """The service's own steps on a session in its cache, without HTTP."""
    with folder_for_bench(arguments.folder) as folder:
        server = ServerProcess(folder).migrate()
        database = Database(server.environment["TURNLOG_DATABASE_URL"])
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(database.close)
            await database.open()
            await write_sessions(database, [("history", history.turns)], _params(history), ended=False)
            settings = Settings(upstreams=("http://127.0.0.1:1",), upstream_dialect="sglang")
            cache = SessionCache(database, Writer(database), settings.cache_bytes)
            stack.push_async_callback(cache.close)
            token_in = TokenIn(cache, history.prompts)
            stack.callback(token_in.close)
            steps = _Steps(cache, token_in, settings, history)
            return await steps.figures(arguments.repeat, arguments.renders)


def _params(history: History) -> bytes:
    return join_object(complete(parse_chat(history.body()).params, "sglang"))


class _Steps:
    """A turn's way from the request's bytes to those for the engine, step by step."""

    def __init__(self, cache: SessionCache, token_in: TokenIn, settings: Settings, history: History) -> None:
        self._cache = cache
        self._token_in = token_in
        self._settings = settings
        self._history = history
        self._body = history.body()

    async def figures(self, repeat: int, renders: int) -> dict[str, Any]:
        """Raises WrongIds."""
        history = self._history
        live = await self._cache.get("history")
        assert live is not None
        request, incoming = self._read(live.session)
        await self._require_right_ids(await self._prepare(live, request, incoming))
        reading: list[float] = []
        preparing: list[float] = []
        for _ in range(repeat):
            reading.append(_cpu_ms(lambda: self._read(live.session)))
            request, incoming = self._read(live.session)
            preparing.append(await _cpu_ms_of(lambda: self._prepare(live, request, incoming)))  # noqa: B023
        prepare_ms, render_ms = statistics.median(preparing), history.render_ms(renders)
        return {
            "tokens of history": history.tokens,
            "request KiB": len(self._body) / 1024,
            "read request ms": statistics.median(reading),
            "prepare ms": prepare_ms,
            "of which tokenizer ms": self._tokenizer_ms(repeat),
            "re-render ms": render_ms,
            "re-render / prepare": render_ms / prepare_ms,
        }

    def _read(self, session: Session) -> tuple[ChatRequest, Incoming]:
        """Parsed, and known again as the stored history: what depends on the request's size."""
        request = parse_chat(self._body)
        incoming = Incoming(request.messages, session.config.matcher)
        incoming.check(session.leaf)
        return request, incoming

    async def _prepare(self, live: CacheEntry, request: ChatRequest, incoming: Incoming) -> bytes:
        """The body for the engine."""
        session = live.session
        plan = incoming.join(session)
        opened = decide.open_turn(session, plan, incarnation=1, body_hash=request.body_hash, retry_key=None)
        claimed = ClaimedTurn(live, session, plan, opened, session.version + 1, "", session.last_event_at)
        sending = engine_request(session, request, self._settings, None, "auto")
        stored = await self._cache.messages(live, plan.parent)
        template = self._token_in.template_of(request)
        assert template is not None
        prompt = await self._token_in.built(claimed, template, incoming, sending)
        ask = EngineRequestOptions(claimed.rid, b"", 0, frozenset())
        return sending.body(ask, [stored, *incoming.new(plan)], None, prompt)

    async def _require_right_ids(self, body: bytes) -> None:
        history = self._history
        if _sent_ids(body) != history.rendered((*history.messages, history.question)):
            raise WrongIds(f"{history.tokens} tokens of history")

    def _tokenizer_ms(self, repeat: int) -> float:
        """Rendering, encoding and joining what is new."""
        history = self._history
        tail = list(memoryview(_last_ids(history.turns[-1])).cast("i"))
        new = [msgspec.json.decode(history.question)]
        return statistics.median(_cpu_ms(lambda: history.prompts.after(tail, new, None, {})) for _ in range(repeat))


def _last_ids(turn: StoredTurn) -> bytes:
    ids = array("i", map(int, turn.text.rstrip(b",").split(b",")[-TAIL:]))
    return ids.tobytes()


class _Body(msgspec.Struct):
    input_ids: list[int]


def _sent_ids(body: bytes) -> list[int]:
    return msgspec.json.decode(body, type=_Body).input_ids


async def _cpu_ms_of(work: Callable[[], Awaitable[object]]) -> float:
    began = time.process_time()
    await work()
    return (time.process_time() - began) * 1000


async def _served(arguments: argparse.Namespace, tokenizer: Path, histories: Sequence[History]) -> list[dict[str, Any]]:
    """A server's CPU a turn with sessions of each length, with the tokenizer and without one."""
    places = cores()
    with folder_for_bench(arguments.folder) as folder, simulator(places) as engine:
        environments = {"token-in": {"TURNLOG_TOKENIZER": str(tokenizer)}, "capture": {}}
        server = ServerProcess(folder).migrate()
        url = server.environment["TURNLOG_DATABASE_URL"]
        names = {setting: await _fill(url, setting, arguments.sessions, histories) for setting in SETTINGS}
        rows: list[dict[str, Any]] = [{} for _ in histories]
        for setting in SETTINGS:
            server = ServerProcess(folder, upstreams=[engine.base_url], environment=environments[setting])
            with pinned(places.server):
                server.start()
            try:
                for history, lanes, row in zip(histories, names[setting], rows, strict=True):
                    served = _Served(server, engine.base_url, history, setting == "token-in")
                    row[f"server CPU ms a turn, {setting}"] = await served.cpu_ms(lanes, arguments.turns)
            finally:
                server.stop()
    return rows


async def _fill(url: str, setting: str, sessions: int, histories: Sequence[History]) -> list[list[str]]:
    """The names of the sessions of each history."""
    database = Database(url)
    await database.open()
    try:
        names = [[f"{setting}-{history.tokens}-{number}" for number in range(sessions)] for history in histories]
        for history, lanes in zip(histories, names, strict=True):
            await write_sessions(database, [(name, history.turns) for name in lanes], _params(history), ended=False)
    finally:
        await database.close()
    return names


class _Served:
    """Turns of sessions that have one history, through a running server."""

    def __init__(self, server: ServerProcess, engine_url: str, history: History, token_in: bool) -> None:
        self._server = server
        self._engine_url = engine_url
        self._history = history
        self._token_in = token_in

    async def cpu_ms(self, names: Sequence[str], turns: int) -> float:
        """A turn each goes before: a session's first brings its history into memory. Raises WrongIds."""
        histories = {name: list(self._history.messages) for name in names}
        async with await Connection.connect(self._server.base_url) as connection:
            for name in names:
                await self._turn(connection, name, histories[name])
                await self._require_ids(histories[name])
            before = cpu_s(self._server.pid)
            for _ in range(turns):
                for name in names:
                    await self._turn(connection, name, histories[name])
            used = cpu_s(self._server.pid) - before
            for name in names:
                await self._turn(connection, name, histories[name])
                await self._require_ids(histories[name])
        return used * 1000 / (turns * len(names))

    async def _turn(self, connection: Connection, name: str, messages: list[bytes]) -> None:
        messages.append(self._history.question)
        body = (FRONT, b",".join(messages), b"]}")
        reply, _ = await timed(connection, f"/sessions/{name}/v1/chat/completions", body)
        messages.append(reply_message(reply))

    async def _require_ids(self, messages: Sequence[bytes]) -> None:
        """What the engine was sent last is the rendering of all messages, or nothing where there is no tokenizer."""
        async with await Connection.connect(self._engine_url) as engine:
            (seen,) = await engine.json("GET", "/sim/requests?last=1")
        sent = seen["body"].get("input_ids")
        expected = self._history.rendered(messages[:-1]) if self._token_in else None
        if sent != expected:
            raise WrongIds(f"{self._history.tokens} tokens of history, through the server")
