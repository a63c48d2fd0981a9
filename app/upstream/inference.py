"""vLLM's `/inference/v1/generate` (with `--enable-scale-out`): the prompt's ids in, and in one reply ids, logprobs,
routed experts, sampling masks and spans of weight versions, which its chat and completions do not have together.

    output_mode   a choice has                     it answers
    text          `text`, logprobs like a chat's   a completion whose prompt is ids (0.32)
    derender      `message`, which it has parsed   a chat whose prompt is ids (0.33)

A chat and a completion take what a request does not name from the model's `generation_config.json`, and the tool
parser may want special tokens in the text; this route does neither. `/v1/chat/completions/render`, which is there with
it, says what they would take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeVar

import msgspec

from app.domain.request import FIRST_ROW_NAMES, join_object
from app.upstream.body import Body
from app.upstream.client import EngineClient
from app.upstream.generate import Fields
from app.upstream.headers import Headers
from app.upstream.streams import UNREADABLE
from workers.parse_json import is_null

GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"

MISSING = frozenset({400, 403, 404, 405, 422, 501})
"""What an engine says that has no such route; vLLM without `--enable-scale-out` 403."""

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "bad_words"),
    *("skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "prompt_logprobs"),
    *("thinking_token_budget", "repetition_detection", "watermarking"),
)
"""Members of `sampling_params` with the same name."""

_FILLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a chat and a completion fill from the model's own."""

_OF_REPLIES = frozenset(
    {
        *("n", "best_of", "stream", "stream_options"),
        *("logprobs", "top_logprobs", "max_tokens", "max_completion_tokens"),
        *("return_weight_versions", "return_token_ids", "return_meta_info", "return_prompt_token_ids"),
        *("chat_template_kwargs", "tool_choice", "parallel_tool_calls", "reasoning_effort", *FIRST_ROW_NAMES),
    }
)
"""What is said otherwise here, or not at all."""

_NOT_HERE = frozenset(
    {
        *("response_format", "structured_outputs", "structural_tag", "guided_json", "guided_regex", "guided_choice"),
        *("guided_grammar", "logit_bias", "logprob_token_ids", "use_beam_search", "echo", "suffix"),
        *("truncate_prompt_tokens", "truncation_side", "continue_final_message", "add_generation_prompt"),
        *("documents", "chat_template", "include_reasoning", "mm_processor_kwargs", "media_io_kwargs"),
        *("return_token_offsets", "return_prompt_text", "return_mm_kwargs", "kv_transfer_params", "ec_transfer_params"),
        *("vllm_xargs", "prompt_embeds", "stream_interval"),
    }
)
"""What only a chat or a completion translates. Other members mean the same here, or nothing."""

T = TypeVar("T")

_PROBE = {"role": "user", "content": "This message asks an engine what a chat would sample with."}
_TOOL = {"type": "function", "function": {"name": "none", "parameters": {"type": "object", "properties": {}}}}


class _Context(msgspec.Struct):
    chat_template_kwargs: dict[str, msgspec.Raw] = {}


class Rendered(msgspec.Struct):
    """What the engine makes of a chat: `sampling_params` has what it fills in."""

    token_ids: list[int]
    sampling_params: dict[str, msgspec.Raw]
    parse_context: _Context | None = None
    reasoning_parser_kwargs: _Context | None = None


class Offer(msgspec.Struct, frozen=True):
    """An engine's route. `chat` and `tools` are what it fills into a chat without tools, and with; None where it does
    not take such a chat."""

    completion: dict[str, msgspec.Raw]
    chat: Rendered | None
    tools: Rendered | None


class _Probed(msgspec.Struct):
    text: str | None = None
    message: dict[str, msgspec.Raw] | None = None
    token_ids: list[int] | None = None


class _Reply(msgspec.Struct):
    choices: tuple[_Probed]


_RENDERED = msgspec.json.Decoder(Rendered)
_REPLY = msgspec.json.Decoder(_Reply)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


async def probe(client: EngineClient, url: str, headers: Headers) -> Offer | Literal["none"] | None:
    """What the engine at `url` offers: asked for a chat's parameters, and for one token. None if it says neither yes
    nor no now. Without a model: an unknown one is 404 too. Raises EngineError."""
    chat = {"messages": [_PROBE]}
    plain = await _asked(client, url + RENDER, headers, chat, _RENDERED)
    if plain is None or plain == "none":
        return plain
    mode = "text" if plain.parse_context is None else "derender"
    one = {
        "token_ids": plain.token_ids,
        "sampling_params": {"max_tokens": 1, "logprobs": 0},
        "output_mode": mode,
        "parse_context": {},
    }
    reply = await _asked(client, url + GENERATE, headers, one, _REPLY)
    if reply is None or reply == "none":
        return reply
    [choice] = reply.choices
    if choice.token_ids is None or (choice.text if mode == "text" else choice.message) is None:
        return "none"
    completion = {name: raw for name, raw in plain.sampling_params.items() if name in (*_FILLED, "stop_token_ids")}
    if mode == "text":
        return Offer(completion, None, None)
    tools = await _asked(client, url + RENDER, headers, {**chat, "tools": [_TOOL]}, _RENDERED)
    if tools is None or tools == "none" or not is_null(tools.sampling_params.get("structured_outputs")):
        return Offer(completion, plain, None)
    return Offer(completion, plain, tools)


async def _asked(
    client: EngineClient, url: str, headers: Headers, body: dict[str, Any], decoder: msgspec.json.Decoder[T]
) -> T | Literal["none"] | None:
    reply = await client.post(url, msgspec.json.encode(body), headers)
    if reply.status != 200:
        return "none" if reply.status in MISSING else None
    try:
        return decoder.decode(reply.body.joined())
    except UNREADABLE:
        return "none"


def takes_chat(params: Fields, tools: bytes | None, offer: Offer) -> Rendered | None:
    """What the engine fills into this chat; None if it must be a chat: a grammar holds the reply, or it has parameters
    that only a chat translates."""
    choice = bytes(params.get("tool_choice", b"null"))
    if tools is None or choice == b'"none"':
        return offer.chat if takes(params) else None
    is_free = choice in (b"null", b'"auto"') and b'"strict"' not in tools
    return offer.tools if is_free and takes(params) else None


def takes(params: Fields) -> bool:
    """Does this route translate these parameters? Alternatives are named by their ids in a chat and in a completion
    alone."""
    set_ = {name for name, raw in params.items() if bytes(raw) not in (b"null", b"false")}
    tops = (params.get(name) for name in ("top_logprobs", "logprobs"))
    return _NOT_HERE.isdisjoint(set_) and all(raw is None or not bytes(raw).strip(b"0").isdigit() for raw in tops)


def completion_body(params: Fields, ids: bytes, filled: Fields, first_row: int) -> bytes:
    """The request for a completion, whose limit is 16 tokens where it names none; null is the model's rest."""
    limit = params.get("max_tokens", msgspec.Raw(b"16"))
    return _body(params, ids, filled, limit, first_row, {"output_mode": b'"text"'})


def chat_body(
    params: Fields, tools: bytes | None, ids: bytes, rendered: Rendered, first_row: int, earlier_calls: int
) -> bytes:
    """The request for a chat. `earlier_calls` are those in its messages, by which some models number theirs."""
    limits = (params.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((raw for raw in limits if not is_null(raw)), None)
    filled = {name: raw for name, raw in rendered.sampling_params.items() if name in _FILLED_CHAT}
    assert rendered.parse_context is not None
    kwargs = {name: bytes(raw) for name, raw in rendered.parse_context.chat_template_kwargs.items()}
    if not is_null(own := params.get("chat_template_kwargs")):
        kwargs |= {name: bytes(raw) for name, raw in _FIELDS.decode(own or b"{}").items()}
    if not is_null(effort := params.get("reasoning_effort")):
        kwargs["reasoning_effort"] = bytes(effort or b"")
    context = {"chat_template_kwargs": join_object(kwargs), "history_tool_call_cnt": b"%d" % earlier_calls}
    if tools is not None:
        choice = params.get("tool_choice")
        context |= {"tools": tools, "tool_choice": b'"auto"' if is_null(choice) else bytes(choice or b"")}
        if not is_null(parallel := params.get("parallel_tool_calls")):
            context["parallel_tool_calls"] = bytes(parallel or b"")
    parsing = {"output_mode": b'"derender"', "parse_context": join_object(context)}
    if rendered.reasoning_parser_kwargs is not None:
        parsing["reasoning_parser_kwargs"] = join_object({"chat_template_kwargs": join_object(kwargs)})
    return _body(params, ids, filled, limit, first_row, parsing)


def _body(
    params: Fields,
    ids: bytes,
    filled: Fields,
    limit: msgspec.Raw | None,
    first_row: int,
    parsing: Mapping[str, bytes],
) -> bytes:
    sampling = {name: bytes(raw) for name, raw in filled.items()}
    sampling |= {name: bytes(params[name]) for name in _SAMPLING if not is_null(params.get(name))}
    if "stop_token_ids" in filled and sampling["stop_token_ids"][:1] == b"[":
        # The model's own end tokens are added to the request's.
        both = dict.fromkeys((sampling["stop_token_ids"], bytes(filled["stop_token_ids"])))
        lists = (_ITEMS.decode(raw) for raw in both)
        sampling["stop_token_ids"] = b"[" + b",".join(bytes(one) for items in lists for one in items) + b"]"
    if not is_null(limit):
        sampling["max_tokens"] = bytes(limit or b"")
    if first_row:
        sampling["routed_experts_prompt_start"] = b"%d" % first_row
    others = {name: bytes(raw) for name, raw in params.items() if name not in _NOT_OTHERS}
    return join_object(
        {
            **others,
            **parsing,
            "sampling_params": join_object({**sampling, "logprobs": b"0"}),
            "return_token_ids": b"true",
            "token_ids": b"[" + ids + b"]",
        }
    )


_FILLED_CHAT = (*_FILLED, "stop_token_ids", "skip_special_tokens")
_NOT_OTHERS = _OF_REPLIES | _NOT_HERE | frozenset(_SAMPLING)


# the reply

_HEAD = re.compile(rb'\{"request_id":"(?:generate-tokens-)?([^"\\]*)",')
_ROWS = b'"routed_experts":"'


class _Top(msgspec.Struct):
    token: str
    logprob: msgspec.Raw


class _Entry(_Top):
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


_CHOICES = msgspec.json.Decoder(tuple[dict[str, msgspec.Raw]])
_LOGPROBS = msgspec.json.Decoder(_Logprobs)


def as_chat(body: Body) -> Body:
    """The reply as a chat's, whose fields have the same names but for the id. What is not read here is refused later:
    a chat's reply has token ids."""
    first = body.beginning(256)
    if (head := _HEAD.match(first)) is None:
        return body
    begun = b'{"id":"chatcmpl-%b","object":"chat.completion",' % head[1]
    return Body([begun, *body.slices(head.end(), body.size)])


def as_completion(body: Body) -> Body:
    """The reply as a completion's; as it is where it cannot be read, which is refused later."""
    raw = body.joined()
    at = raw.find(_ROWS) + len(_ROWS) - 1
    rows: Sequence[bytes | memoryview] = []
    if at >= len(_ROWS):  # Megabytes, which are not decoded.
        end = raw.find(b'"', at + 1) + 1
        rows = [b',"routed_experts":', memoryview(raw)[at:end]]
        raw = b"%b%b%b" % (raw[:at], b"null", raw[end:])
    try:
        root = _FIELDS.decode(raw)
        [choice] = _CHOICES.decode(root["choices"])
        entries = _LOGPROBS.decode(choice["logprobs"]).content
    except (*UNREADABLE, KeyError):
        return body
    head = _HEAD.match(raw)
    name = root.get("request_id", b'""') if head is None else b'"cmpl-%b"' % head[1]
    fields = {kind: bytes(value) for kind, value in choice.items() if kind not in ("logprobs", "routed_experts")}
    fields |= {kind: bytes(root[kind]) for kind in ("prompt_logprobs", "prompt_token_ids") if kind in root}
    of_root = {kind: bytes(value) for kind, value in root.items() if kind not in _OF_CHOICE}
    before = join_object({"id": bytes(name), "object": b'"text_completion"', **of_root})
    within = join_object({**fields, "logprobs": _completion_logprobs(entries)})
    return Body([before[:-1] + b',"choices":[' + within[:-1], *rows, b"}]}"])


_OF_CHOICE = frozenset({"request_id", "choices", "output_mode", "prompt_logprobs", "prompt_token_ids"})


def _completion_logprobs(entries: Sequence[_Entry]) -> bytes:
    offsets = [0, *accumulate(len(entry.token) for entry in entries)][: len(entries)]
    tops = [{top.token: top.logprob for top in entry.top_logprobs or (entry,)} for entry in entries]
    return msgspec.json.encode(
        {
            "text_offset": offsets,
            "token_logprobs": [entry.logprob for entry in entries],
            "tokens": [entry.token for entry in entries],
            "top_logprobs": tops,
        }
    )
