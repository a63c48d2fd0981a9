"""SGLang's own routes for a chat that is streamed or staged: what its chat does to a reply, and what parses a text as
its chat would.

The parsers are the engine's (`/separate_reasoning`, `/parse_function_call`), named as it was started with them
(`/server_info`), so that a model of any format has the message of its chat.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

import msgspec

from app.domain.request import join_object, value_of
from app.errors import UpstreamInvalid
from app.fleet.engines import Engines
from app.fleet.member import Member
from app.upstream.body import Body
from app.upstream.client import EngineClient, EngineReply
from app.upstream.generate import Fields, ServerInfo
from app.upstream.headers import to_control
from app.upstream.streams import UNREADABLE

log = logging.getLogger("turnlog.native")

SERVER_INFO = "/server_info"
OPEN, CLOSE = "<think>", "</think>"


class _Separated(msgspec.Struct):
    reasoning_text: str | None = None
    text: str | None = None


class _Call(msgspec.Struct):
    name: str | None
    parameters: str
    tool_index: int = 0


class _Called(msgspec.Struct):
    normal_text: str
    calls: list[_Call]


class _Content(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Content


class _Reply(msgspec.Struct):
    choices: tuple[_Choice]


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(tuple[dict[str, msgspec.Raw]])
_INFO = msgspec.json.Decoder(ServerInfo)


class NativeRoutes:
    """Those of all engines."""

    def __init__(self, client: EngineClient, engines: Engines, api_key: str | None, *, is_staging: bool) -> None:
        self._client = client
        self._engines = engines
        self._headers = to_control(api_key)
        self._is_staging = is_staging

    async def info(self, url: str) -> ServerInfo:
        """What the engine says of itself, asked once until it restarts; an engine without the route says nothing.

        Raises EngineError.
        """
        member = self._engines.members.get(url) or Member(url)
        if member.server_info is None or member.is_refusing:
            reply = await self._client.get(url + SERVER_INFO, self._headers)
            try:
                member.server_info = _INFO.decode(reply.body.joined()) if reply.status == 200 else ServerInfo()
            except UNREADABLE:
                member.server_info = ServerInfo()
            if self._is_staging and not member.server_info.incremental_streaming_output:
                log.warning("%s does not stream increments: its turns are not staged (docs/fleet.md)", url)
        return member.server_info

    async def chat(
        self, answer: EngineReply, run: str, session_id: str, params: Fields, tools: bytes | None, ids: bytes
    ) -> EngineReply:
        """The answer as the engine's chat would have given it. Another engine of the run parses it if that one is gone.

        Raises as `Engines.first_reached`.
        """
        raw = answer.body.joined()
        text = _REPLY.decode(raw).choices[0].message.content
        choices: list[dict[str, Any]] = []

        async def ask(url: str) -> Any:
            choices.append(await self._message(url, text, params, tools))
            return answer

        await self._engines.first_reached(self._engines.order(run, session_id, answer.engine), ask)
        body = _with_message(raw, choices[-1], params, ids)
        return msgspec.structs.replace(answer, body=Body([body]), is_native=False)

    async def _message(self, url: str, text: str, params: Fields, tools: bytes | None) -> dict[str, Any]:
        """Raises EngineError, UpstreamInvalid."""
        info = await self.info(url)
        reasoning, calls = None, list[_Call]()
        separates = value_of(params.get("separate_reasoning"), "separate_reasoning") is not False
        if info.reasoning_parser is not None and separates:
            asked = {"text": _opened(text, info, params), "reasoning_parser": info.reasoning_parser}
            separated = await self._parsed(url + "/separate_reasoning", asked, _Separated)
            reasoning, text = separated.reasoning_text or None, separated.text or ""
        if info.tool_call_parser is not None and tools is not None:
            listed = {"text": text, "tools": msgspec.Raw(tools), "tool_call_parser": info.tool_call_parser}
            called = await self._parsed(url + "/parse_function_call", listed, _Called)
            text, calls = called.normal_text, called.calls
        message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": reasoning}
        return {**message, "tool_calls": calls} if calls else message

    async def _parsed(self, url: str, body: dict[str, Any], kind: type[Any]) -> Any:
        reply = await self._client.post(url, msgspec.json.encode(body), self._headers)
        try:
            if reply.status == 200:
                return msgspec.json.decode(reply.body.joined(), type=kind)
        except UNREADABLE as error:
            raise UpstreamInvalid(f"{url} returned a malformed reply: {error}") from error
        raise UpstreamInvalid(f"{url} answered {reply.status}")


_REPLY = msgspec.json.Decoder(_Reply)


def _opened(text: str, info: ServerInfo, params: Fields) -> str:
    """The text as the parser's route reads it: where the prompt has opened the reasoning, the chat knows and it does
    not."""
    arguments = value_of(params.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    thinks = info.reasoning_parser == "qwen3" and arguments.get("enable_thinking") is not False
    return OPEN + text if OPEN not in text and (CLOSE in text or thinks) else text


def _with_message(raw: bytes, message: dict[str, Any], params: Fields, ids: bytes) -> bytes:
    root = {name: bytes(value) for name, value in _FIELDS.decode(raw).items()}
    [fields] = _CHOICES.decode(root["choices"])
    choice = {name: bytes(value) for name, value in fields.items()}
    if "tool_calls" in message:
        message["tool_calls"] = [_shown(call, number, root["id"]) for number, call in enumerate(message["tool_calls"])]
        if choice["finish_reason"] == b'"stop"':
            choice["finish_reason"], choice["matched_stop"] = b'"tool_calls"', b"null"
            meta = {name: bytes(value) for name, value in _FIELDS.decode(choice["meta_info"]).items()}
            choice["meta_info"] = join_object({**meta, "finish_reason": b'{"type":"tool_calls","matched":null}'})
    choice["message"] = msgspec.json.encode(message)
    choice["prompt_token_ids"] = b"[" + ids + b"]"
    root["choices"] = b"[" + join_object(choice) + b"]"
    model = params.get("model")
    return join_object(
        {**root, "created": str(int(time.time())).encode(), "model": b'"default"' if model is None else bytes(model)}
    )


def _shown(call: _Call, number: int, name: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(b"%b\0%d" % (name, number)).hexdigest()[:24]
    function = {"name": call.name, "arguments": call.parameters}
    return {"id": f"call_{digest}", "index": number, "type": "function", "function": function}
