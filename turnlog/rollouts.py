"""A rollout of an agent for a trainer: played once under its name, and returned as rows of the trainer's shape.

An agent is miles' function: `run(base_url, prompt, request_kwargs, metadata)`, asynchronous or not, found by its import
path; or a command. What it returns, or the last line that the command prints, is the reward, or a mapping with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import logging
import math
import os
import re
import signal
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import httpx

from turnlog.client._async.client import AsyncTurnlog
from turnlog.client._async.session import AsyncSession
from turnlog.client.address import TOKENS, default_run
from turnlog.client.checked import checked
from turnlog.errors import Conflict, InvalidRequest, NotFound, Restored, TurnlogError
from turnlog.parameters import Failure, FailureKind, Shape
from turnlog.replies import State

log = logging.getLogger("turnlog.rollouts")

Result = float | Mapping[str, Any] | None
Agent = Callable[..., Awaitable[Result] | Result]
"""Called with `base_url`, `prompt`, `request_kwargs` and `metadata`, all by name.

base_url: the session's address without `/v1`; an OpenAI client takes it with or without, an Anthropic client as it is.
request_kwargs: the trainer's sampling parameters by their names in a chat request.
metadata: what the data set and the trainer say, and `session_id`, `api_key`, `public_url`, `group_id`, `attempt`,
    `evaluation`, `step`.

Returns the reward, a mapping or None. Of a mapping `reward`, `reward_components` and `failed` (as `close` takes it) are
the session's, and all of it is kept in the annotation `rollout`. What it raises becomes the session's `failed`.
"""

NAMES_OF_ENGINES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
OF_A_CHAT = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "min_tokens", "stop"),
        *("stop_token_ids", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
        *("skip_special_tokens", "logit_bias", "chat_template_kwargs", "tools"),
    }
)
NO_TOP_K = -1
PINNED = ("temperature", "top_p", "top_k")
"""What a policy's logprobs depend on: the session sends them with every request, whatever the agent sends."""

ROLLOUT = "rollout"
"""The session's annotation that says how far its agent is: `ended` or not, and then its `result`, `reward`,
`components` and `failed`. It is written before the agent begins, and before the reward and the close. So a session
without it is new, and one whose agent has not ended belongs to a process that died."""

CANCELLED: Failure = {"kind": "other", "message": "the rollout was cancelled"}
LEFT: Failure = {"kind": "other", "message": "the process that played this rollout ended before its agent did"}

LONGEST_NAME, LONGEST_MESSAGE, LONGEST_RESULT = 100, 2000, 60_000
TAIL_LINES, LONGEST_TAIL, LONGEST_LINE = 40, 1800, 1 << 20
PATIENCE_S = 600.0
"""How long the server may be away, restarted or moved, before a rollout raises; for an adapter's own client, too."""

END_S = 10.0
"""How long a command has between SIGTERM and SIGKILL, and an end that was not heard of is waited for."""

NOT_FOR_COMMANDS = frozenset((*TOKENS, "TURNLOG_SESSION_SECRET", "TURNLOG_DATABASE_URL", "ANTHROPIC_API_KEY"))
"""Variables of the trainer's process that a command, which a model may drive, does not inherit. Anthropic's clients
would send the last in the place of the session's token."""


class Outcome(NamedTuple):
    """What became of a rollout. `failed` is the session's; `error` is the agent's exception, None for one that another
    process saw. `result` is what the agent returned, also if another process played it; `played`: this call did."""

    session_id: str
    status: Literal["completed", "truncated", "aborted", "failed", "empty"]
    reward: float | None
    failed: Failure | None
    result: Any
    error: Exception | None
    played: bool


class Rollout(NamedTuple):
    rows: list[dict[str, Any]]
    outcome: Outcome


class CommandFailed(Exception):
    """An agent's command ended with another code than 0; the message has its last lines."""


def name_of(*parts: object) -> str:
    """A name that can begin a session's id: the parts, and where they do not fit, a hash of them."""
    named = ":".join(map(str, parts))
    if re.fullmatch(rf"[A-Za-z0-9._:-]{{1,{LONGEST_NAME}}}", named):
        return named
    return sha256(named.encode()).hexdigest()


def life(run: str | None) -> tuple[str, ...]:
    """How an adapter's names begin: with nothing in a named run, since names are the run's; else with a part that no
    other process has, or a second training without a run would read the rollouts of the first."""
    return (_of_this_process(),) if (run or default_run()) in (None, "default") else ()


@cache
def _of_this_process() -> str:
    log.warning("no run is named (run=, TURNLOG_RUN): a trainer that is started again plays all rollouts again")
    return uuid.uuid4().hex[:12]


def load(agent: Agent | str | None) -> Agent:
    """The agent: itself, `package.module:name` or `package.module.name`; by default `TURNLOG_AGENT`. Raises ValueError
    if none is named, ImportError and AttributeError."""
    named = agent or os.environ.get("TURNLOG_AGENT")
    if not named:
        raise ValueError("there is no agent: pass one, or set TURNLOG_AGENT to package.module:name")
    if not isinstance(named, str):
        return named
    module, _, name = named.replace(":", ".").rpartition(".")
    if not module:
        raise ValueError(f"{named!r} is not an agent: expected package.module:name")
    return cast(Agent, getattr(importlib.import_module(module), name))


def request_kwargs(sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    """A trainer's sampling parameters as fields of a chat request. What means "the engine's own" (None, a `top_k` of -1
    or 0, an empty list) and what no chat request has is left out."""
    named = {NAMES_OF_ENGINES.get(name, name): value for name, value in (sampling or {}).items()}
    meant = {name: value for name, value in named.items() if name in OF_A_CHAT and value is not None and value != []}
    return {name: value for name, value in meant.items() if not (name == "top_k" and value in (NO_TOP_K, 0))}


async def rollout(
    agent: Agent | str | None,
    prompt: Any,
    *,
    name: str,
    shape: Shape = "turnlog",
    command: str | Sequence[str] | None = None,
    sampling: Mapping[str, Any] | None = None,
    pin: bool = True,
    metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    group_id: str | None = None,
    attempt: int | None = None,
    evaluation: bool = False,
    timeout_s: float | None = None,
    failed: Literal["keep", "drop"] = "keep",
    retry_failed: int = 0,
    export: Mapping[str, Any] | None = None,
    turnlog: AsyncTurnlog | None = None,
    **fields: Any,
) -> Rollout:
    """Play the agent on a prompt in a session of its own, and return the session's rows in a shape.

    name: played once, also if the trainer or the server dies meanwhile: asked for again, a rollout that came to its end
        is read, and one that did not is closed as failed, and another is played. The run (`run`, by default
        `TURNLOG_RUN`, else the token's) is a part of it. One process at a time may ask for a name.
    command: instead of an agent: words, or a line for the shell. `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
        `ANTHROPIC_BASE_URL`, `ANTHROPIC_AUTH_TOKEN` and `TURNLOG_SESSION_ID` are set for it, its input is the prompt's
        text, and `TURNLOG_ROLLOUT` names a JSON file with `prompt`, `request_kwargs` and `metadata`. If its last line
        is a number or a JSON object, that is its result; another exit code than 0 is a failure.
    sampling: the trainer's parameters; `pin` sends temperature, top_p and top_k with every request of the session.
    timeout_s: after it the agent is cancelled, a command is ended, and the session closed as failed; a function in a
        thread runs on, and its next request is refused.
    failed: the rows of a rollout that failed: keep, or drop. retry_failed: how many that failed are played again.
    export: more arguments of `export`. fields: more of `create_session`; always the same for a name.

    Raises TurnlogError, and what `load` raises. An agent's exception is not raised: it is logged, `outcome.error` is
    the exception, and the session's `failed` says its kind.
    """
    run = None if command is not None else load(agent)
    kwargs = request_kwargs(sampling)
    # The engine's own value of these is pinned, too: an agent that asks for another would sample from another policy.
    pinned = {key: value for key, value in (sampling or {}).items() if key in PINNED and value is not None}
    if pinned.get("top_k") == 0:
        pinned["top_k"] = NO_TOP_K  # Which SGLang takes as well.
    if pin and pinned:
        fields["params"] = {**pinned, **(fields.get("params") or {})}
    fields = {"history": "tree", "group_id": group_id, "attempt": attempt, "evaluation": evaluation or None, **fields}
    said_to_agent = {"group_id": group_id, "attempt": attempt, "evaluation": evaluation, "step": step}
    failures = 0
    async with contextlib.AsyncExitStack() as stack:
        server = turnlog
        if server is None:
            server = await stack.enter_async_context(AsyncTurnlog(retry_for_s=PATIENCE_S))
        of_run = fields.get("run") or server.own_run
        name = name_of(name) if of_run in (None, "default") else name_of(of_run, name)
        for number in itertools.count():
            session_id, error, played = f"{name}.{number}", None, False
            try:
                session = await server.create_session(session_id=session_id, **fields)
            except Restored:  # Undone by a checkpoint's restore: its id is not used again.
                continue
            except (Conflict, NotFound) as refused:
                if refused.code != "session_closed":
                    raise
                session = server.attach(session_id)
            state = await session.state()
            if state["erased"]:
                continue
            told = await _told(session, state)
            if told is None and state["status"] == "open" and not (state["turns"] or state["open_turns"]):
                await session.annotate(ROLLOUT, {"ended": False})
                known = {"session_id": session_id, "api_key": session.token or "EMPTY", "public_url": session.url}
                asked = _Asked(prompt, kwargs, {**(metadata or {}), **said_to_agent, **known})
                try:
                    played, error = True, await _play(session, run, command, asked, timeout_s)
                except BaseException:
                    with contextlib.suppress(TurnlogError, TimeoutError):
                        async with asyncio.timeout(END_S):
                            await session.close(failed=CANCELLED)
                    raise
            elif told is None or not told["ended"]:
                await session.close(failed=LEFT)
                continue
            elif state["status"] == "open":
                await _close(session, told)
            state = await session.state()
            told = await _told(session, state) or {}
            failure = cast(Failure | None, state["failed"])
            if failure is None and (state["reward"] is None or told.get("reward") is not None):
                failure = told.get("failed")  # The session was closed before the agent had failed.
            if failure is not None and failures < retry_failed:
                failures += 1
                continue
            rows: list[dict[str, Any]] = []
            if failure is None or failed == "keep":
                wanted: dict[str, Any] = {"evaluation": True, **(export or {}), "session_id": session_id}
                rows = [cast(dict[str, Any], row) async for row in server.export(shape=shape, **wanted)]
            reward = state["reward"]["reward"] if state["reward"] is not None else None
            status = "failed" if failure is not None else _status(state)
            return Rollout(rows, Outcome(session_id, status, reward, failure, told.get("result"), error, played))
    raise AssertionError("unreachable")


class _Asked(NamedTuple):
    prompt: Any
    request_kwargs: dict[str, Any]
    metadata: dict[str, Any]


async def _play(
    session: AsyncSession,
    run: Agent | None,
    command: str | Sequence[str] | None,
    asked: _Asked,
    timeout_s: float | None,
) -> Exception | None:
    """Run the agent, write down what became of it and close the session; its exception."""
    result: Any = None
    error: Exception | None = None
    try:
        async with asyncio.timeout(timeout_s):
            if command is not None:
                result = await _run_command(command, session, asked)
            elif inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(type(run).__call__):
                result = await cast(Any, run)(base_url=session.anthropic_base_url, **asked._asdict())
            else:
                result = await _in_a_thread(cast(Agent, run), base_url=session.anthropic_base_url, **asked._asdict())
        told = _checked(result)
    except (Exception, SystemExit) as raised:  # An agent may raise anything.
        error = raised if isinstance(raised, Exception) else RuntimeError(f"the agent ended by {raised!r}")
        log.warning("the agent of session %s failed", session.id, exc_info=error)
        message = f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE].replace("\0", "\N{REPLACEMENT CHARACTER}")
        told = {"failed": {"kind": _kind(error), "message": message}}
    kept = _kept(session, result)
    try:
        await session.annotate(ROLLOUT, {"ended": True, "result": kept, **told})
    except InvalidRequest as refused:  # Such as one that is nested too deep.
        log.warning("the result of session %s could not be stored: %s", session.id, refused)
        await session.annotate(ROLLOUT, {"ended": True, **told})
    await _close(session, told)
    return error


def _checked(result: Any) -> dict[str, Any]:
    """The reward, its components and the failure of a result, as JSON has them. Raises TypeError, ValueError."""
    said = result if isinstance(result, Mapping) else {"reward": result}
    told: dict[str, Any] = {}
    if said.get("reward") is not None:
        told["reward"] = float(said["reward"])
        told["components"] = {str(name): float(part) for name, part in (said.get("reward_components") or {}).items()}
        if not all(map(math.isfinite, (told["reward"], *told["components"].values()))):
            raise ValueError(f"a reward must be finite, not {told['reward']} of {told['components']}")
    if said.get("failed"):
        told["failed"] = checked(Failure, said["failed"])
    return told


def _kept(session: AsyncSession, result: Any) -> Any:
    """The result as JSON has it; None in the place of one that is too long or cannot be spelled."""
    try:
        text = json.dumps(result, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        log.warning("the result of session %s could not be stored: %s", session.id, error)
        return None
    if len(text) > LONGEST_RESULT:
        log.warning("the result of session %s has %d characters, too many to be stored", session.id, len(text))
        return None
    return json.loads(text, parse_constant=str)


async def _close(session: AsyncSession, told: Mapping[str, Any]) -> None:
    """Give the session what its annotation says. Repeating it changes nothing."""
    if told.get("reward") is not None:
        await session.set_reward(told["reward"], components=told.get("components"))
    await session.close(failed=told.get("failed"))


def _kind(error: BaseException) -> FailureKind:
    """Clients of OpenAI and Anthropic say the status of a reply that they raise, or httpx's error is the cause."""
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and status >= 500:
        return "engine"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError | httpx.TimeoutException):
            return "timeout"
        if isinstance(cause, ConnectionError | httpx.TransportError):
            return "engine"
        cause = cause.__cause__
    return "agent"


async def _told(session: AsyncSession, state: State) -> dict[str, Any] | None:
    """What the annotation says, None where there is none; its value is not in the state where it is long."""
    said = next((one for one in state["annotations"].get("0", ()) if one["name"] == ROLLOUT), None)
    if said is None:
        return None
    return cast(dict[str, Any], said["value"] if "value" in said else await session.annotation(ROLLOUT))


def _status(state: State) -> Literal["completed", "truncated", "aborted", "empty"]:
    """Of the worst of its live turns, as rows have it."""
    ends = {turn["finish_reason"] for turn in state["turns"] if turn["live"]}
    if not ends:
        return "empty"
    return "aborted" if "abort" in ends else "truncated" if "length" in ends else "completed"


async def _in_a_thread(run: Agent, **arguments: Any) -> Any:
    """A thread for each: the loop's own pool has few, and an agent may take days. It cannot be ended: a process may end
    before it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(outcome: Any, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(outcome)
            else:
                done.set_exception(error)

    def work() -> None:
        outcome, error = None, None
        try:
            outcome = run(**arguments)
            if inspect.isawaitable(outcome):
                outcome = asyncio.run(_awaited(outcome))
        except BaseException as raised:  # noqa: BLE001  # It is raised where the agent was called.
            is_plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if is_plain else RuntimeError(f"the agent ended by {raised!r}")
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
            loop.call_soon_threadsafe(tell, outcome, error)

    threading.Thread(target=work, name=f"agent of {arguments['metadata']['session_id']}", daemon=True).start()
    return await done


async def _awaited(outcome: Awaitable[Any]) -> Any:
    return await outcome


async def _run_command(command: str | Sequence[str], session: AsyncSession, asked: _Asked) -> Any:
    """The number or object in its last line, or None. Raises CommandFailed. It is ended with what it started."""
    key = session.token or "EMPTY"
    with tempfile.TemporaryDirectory(prefix="turnlog-") as folder:
        file = Path(folder, "rollout.json")
        file.write_text(json.dumps(asked._asdict(), default=str))
        told = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_AUTH_TOKEN": key,
            "TURNLOG_SESSION_ID": session.id,
            "TURNLOG_ROLLOUT": str(file),
        }
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_COMMANDS}
        words = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, env={**inherited, **told}, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: PT018
        printed, complained = _Tail(), _Tail()
        passing = [
            asyncio.create_task(printed.read(process.stdout)),
            asyncio.create_task(complained.read(process.stderr)),
            asyncio.create_task(_write(process.stdin, text_of(asked.prompt))),
        ]
        try:
            await _exit(process, None)
        finally:
            await _end(process)
            # What it started and left behind may hold the pipes open.
            _, unfinished = await asyncio.wait(passing, timeout=END_S)
            for task in unfinished:
                task.cancel()
    if process.returncode:
        said = "\n".join(complained.lines or printed.lines)[-LONGEST_TAIL:]
        raise CommandFailed(f"exit code {process.returncode}: {said}")
    last = printed.lines[-1] if printed.lines else ""
    if len(last) >= LONGEST_LINE:
        log.warning("the last line of session %s's command is too long to be its result", session.id)
    try:
        found = json.loads(last)
    except ValueError:
        return None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return found if is_number or isinstance(found, dict) else None


def text_of(prompt: Any) -> str:
    """A prompt's text: itself, of messages the last user's, else its JSON."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence):
        for message in reversed(prompt):
            if isinstance(message, Mapping) and message.get("role") == "user":
                content = message.get("content")
                if isinstance(content, str):
                    return content
                return "\n".join(part["text"] for part in content or () if part.get("type") == "text")
    return json.dumps(prompt, default=str)


async def _write(stdin: asyncio.StreamWriter, text: str) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The command reads no input.
        stdin.write(text.encode())
        await stdin.drain()
    stdin.close()


class _Tail:
    """The last lines that are not empty; of a line that is too long its end."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._rest = b""

    @property
    def lines(self) -> list[str]:
        rest = [self._rest] if self._rest.strip() else []
        return [line.decode(errors="replace") for line in (*self._lines, *rest)]

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            *whole, rest = (self._rest + part).split(b"\n")
            self._lines.extend(one[-LONGEST_LINE:] for one in whole if one.strip())
            self._rest = rest[-LONGEST_LINE:]


async def _exit(process: asyncio.subprocess.Process, timeout_s: float | None) -> None:
    """Wait for the program itself: in some versions of Python `wait` also waits for its pipes."""
    waiting = asyncio.create_task(process.wait())
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    try:
        while process.returncode is None and (deadline is None or asyncio.get_running_loop().time() < deadline):
            await asyncio.wait([waiting], timeout=0.2)
    finally:
        waiting.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program, if it runs, and what is left of its process group."""
    try:
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            await _exit(process, END_S)
    finally:
        _signal(process, signal.SIGKILL)


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
