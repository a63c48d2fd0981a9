"""Checks the engines: can they be reached, what is their dialect, and do their replies contain what a turn needs?"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from app.domain.fleet import Fleet
from app.upstream.client import EngineClient, EngineReply
from app.upstream.dialects import complete, returns
from app.upstream.headers import to_control, to_engine
from app.upstream.http import EngineError
from turnlog.cli.doctor.findings import Finding, ok, problem, warning
from workers.parse import Parsed, Rejected, parse_reply
from workers.reply import Job

if TYPE_CHECKING:
    from app.settings import Settings
    from app.tito.prompts import Prompts
    from turnlog.cli.doctor.server import Engines

SHORT_S = 5.0
"""Timeout of a request that costs an engine nothing."""

GENERATE_S = 60.0
"""Timeout of a short generation by an engine that may be busy."""

TOKENS = 4
MESSAGES = [{"role": "user", "content": "Say hello."}]


async def examine(
    settings: Settings, fleet: Fleet | None, told: Engines, prompts: Prompts | None, *, generate: bool
) -> list[Finding]:
    """The engines of the settings, of a running server, and, if the database can be read, those added at run time."""
    known = dict.fromkeys([*(one.url for one in (fleet or Fleet()).members(settings.upstreams)), *(told or ())])
    if not known:
        return [_none(told)]
    client = EngineClient(
        connect_timeout_s=min(settings.upstream_connect_timeout_s, SHORT_S),
        timeout_s=GENERATE_S,
        max_bytes=settings.max_upstream_bytes,
    )
    try:
        looked = await asyncio.gather(*(_look(client, settings, url, prompts, generate) for url in known))
    finally:
        await client.close()
    found = [finding for findings in looked for finding in findings]
    if fleet is None:
        return found
    for run in (None, *fleet.runs):
        of_run, option = ("", "") if run is None else (f" of run {run}", f" --run {run}")
        gates = fleet.gates_of(run)
        if gates.fleet.is_shut:
            shut = f"the gate of the fleet{of_run} is shut: turns wait"
            found.append(warning("engines", shut, f"turnlog resume --fleet{option}"))
        for name, gate in gates.adapters.items():
            if gate.is_shut:
                shut = f"the gate of adapter {name}{of_run} is shut"
                found.append(warning("engines", shut, f"turnlog resume {name}{option}"))
    without = sorted(fleet.owners - {engine.run for engine in fleet.members(settings.upstreams)})
    gone = "run {0} has no engines left: its turns get 503", "turnlog engines add URL --run {0}"
    return [*found, *(warning("engines", *(text.format(run) for text in gone)) for run in without)]


def _none(told: Engines) -> Finding:
    if told is None:
        todo = "set TURNLOG_TOKEN to the server's admin token"
        return warning("engines", "TURNLOG_UPSTREAMS is not set here, and the server does not report its engines", todo)
    return problem("engines", "no engine is known", "set TURNLOG_UPSTREAMS, or turnlog engines add URL")


async def _look(
    client: EngineClient, settings: Settings, url: str, prompts: Prompts | None, generate: bool
) -> list[Finding]:
    area = f"engine {url}"
    headers = to_control(settings.upstream_api_key)
    info = await _asked(client, f"{url}/model_info", headers)
    if isinstance(info, str):
        return [
            problem(
                area,
                info,
                "start it, or correct TURNLOG_UPSTREAMS; turnlog engines remove URL removes one that was added",
            )
        ]
    parts = urlsplit(url)
    health = await _asked(client, f"{parts.scheme}://{parts.netloc}/health", headers)
    if not isinstance(health, str) and _fields(health.body.joined()).keys() >= {"session_server_instance_id", "writer"}:
        # It passes /v1/models on, so that it would look like its own engine.
        return [
            problem(
                area, "this is another Turnlog server, not an engine", "name its engines in TURNLOG_UPSTREAMS instead"
            )
        ]
    models = await _asked(client, f"{url}/v1/models", headers)
    if isinstance(models, str) or models.status != 200:
        why = models if isinstance(models, str) else f"/v1/models answers {models.status}"
        key = "Is TURNLOG_UPSTREAM_API_KEY the key it was started with?"
        return [problem(area, why, f"is it an engine of SGLang or vLLM, without /v1 in its URL? {key}")]
    model = _model(models.body.joined())
    if model is None:
        return [problem(area, "/v1/models names no model", "is it an engine of SGLang or vLLM?")]
    version = _fields(info.body.joined()).get("weight_version") if info.status == 200 else None
    told = f"it serves {model}" + (f", weight version {version}" if version is not None else "")
    if not generate:
        return [ok(area, told)]
    return [ok(area, told), *await _generated(client, settings, url, model, prompts)]


async def _generated(
    client: EngineClient, settings: Settings, url: str, model: str, prompts: Prompts | None
) -> list[Finding]:
    """A short chat, requested and validated like a turn."""
    area = f"engine {url}"
    wish = {"model": model, "max_tokens": TOKENS, **({"top_k": 8} if "sampling_mask" in settings.replay else {})}
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in wish.items()}
    fields = complete(raw, settings.upstream_dialect, settings.replay)
    fields["messages"] = msgspec.json.encode(MESSAGES)
    body = msgspec.json.encode({name: msgspec.Raw(value) for name, value in fields.items()})
    try:
        reply = await client.post(
            f"{url}/v1/chat/completions", body, to_engine((), "turnlog-doctor", settings.upstream_api_key)
        )
    except EngineError as error:
        return [
            problem(area, f"no generation: {type(error).__name__}", "it answers, but generates nothing: see its log")
        ]
    if reply.status != 200:
        return [problem(area, f"it answers a chat with {reply.status}", "see the engine's log")]
    try:
        parsed = parse_reply(reply.body.joined(), Job(settings.upstream_dialect, None, [], [], [], 200, "", b""))
    except Rejected as error:
        todo = "start it so that it returns ids and logprobs of all tokens (docs/operations.md#watch)"
        return [problem(area, f"its reply cannot be recorded as a turn: {error}", todo)]
    said = parsed.reply
    facts = f"{said.output_tokens} tokens, each with id and logprob, finish {said.finish_reason}"
    found = [ok(area, f"{said.dialect}: {facts}")]
    found += _payloads(area, settings, parsed)
    if prompts is not None:
        found.append(_same_prompt(area, parsed, prompts))
    return found


def _payloads(area: str, settings: Settings, parsed: Parsed) -> list[Finding]:
    there = {kind for kind, _ in parsed.payloads}
    missing = [
        kind for kind in settings.replay if returns(kind, settings.upstream_dialect, "chat") and kind not in there
    ]
    if missing:
        todo = f"start it with the option for it (SGLang: --enable-return-{missing[0].replace('_', '-')}), or unset it"
        return [problem(area, f"TURNLOG_REPLAY asks for {', '.join(missing)}, which it does not return", todo)]
    return [ok(area, f"it returns {', '.join(settings.replay)}")] if settings.replay else []


def _same_prompt(area: str, parsed: Parsed, prompts: Prompts) -> Finding:
    """Does the engine render and tokenise a chat like the local tokenizer?"""
    theirs = array("i", parsed.tokens.suffix_ids)
    ours = prompts.first(MESSAGES, None, {})
    if theirs == ours:
        return ok(area, "its prompt ids match those of TURNLOG_TOKENIZER")
    at = next((n for n, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), math.inf)
    place = f"id {at} differs" if at != math.inf else f"{len(theirs)} ids instead of {len(ours)}"
    todo = "is TURNLOG_TOKENIZER the model's own, with the chat template that the engine uses?"
    return warning(area, f"its prompt ids differ from those of TURNLOG_TOKENIZER: {place}", todo)


async def _asked(client: EngineClient, url: str, headers: list[tuple[str, str]]) -> EngineReply | str:
    """The answer, or the reason why there is none."""
    try:
        async with asyncio.timeout(SHORT_S):
            return await client.get(url, headers)
    except EngineError as error:
        return f"it cannot be reached ({type(error).__name__}: {error})"
    except TimeoutError:
        return f"no answer in {SHORT_S:g} s"


def _model(body: bytes) -> str | None:
    data = _fields(body).get("data")
    first = data[0] if isinstance(data, list) and data else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
