"""SGLang's `/generate`, for a chat whose prompt's ids are known (0.5.23): the chat's stream has its ids at
the end alone, too late to go on from.

A chat's parameters are spelled otherwise there. One that has no counterpart, or that means something only to the
template or a grammar, keeps the turn a chat.

The stream, with `--incremental-streaming-output`, is read into the reply to a chat:

    event       has
    each        text, output_ids, meta_info: output_token_logprobs of what is new, and counts so far
    last        also meta_info.finish_reason
    then        `[DONE]`

A request that is aborted in the waiting queue, at once or after the engine took it back there, ends with an event
that repeats what came: behind what is new, all text and logprobs and the last id. Its meta_info has no prompt_tokens.

The message of that reply has the whole text as its content: only the engine's parsers know what of it is reasoning or a
call (`app.fleet.native`). What the engine cannot know is written with it: the time, the model, the prompt's ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from app.domain.request import join_object
from app.upstream.streams import BadStream, CutStream, EventReader, require_no_error, require_within, told_error
from workers.parse_json import is_null
from workers.reply import REPLAY

GENERATE = "/generate"

Fields = Mapping[str, msgspec.Raw]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim", "skip_special_tokens", "custom_params"),
)
"""Members of `sampling_params` with the same name."""

_LIMITS = ("max_completion_tokens", "max_tokens")
"""In the order in which a chat reads them, for `max_new_tokens`."""

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Where a request has none, a chat takes the model's own and `/generate` does not, unless the engine runs with
`--sampling-defaults openai`."""

_OF_CHATS = frozenset(
    {
        *("model", "n", "stream", "stream_options", "logprobs", "top_logprobs", "user", "response_format"),
        *("return_meta_info", "return_prompt_token_ids", "return_token_ids", "return_weight_versions"),
        *("prompt_logprobs", "logprob_start_len", "return_flat_raw_output_top_logprobs"),
        *("chat_template_kwargs", "separate_reasoning", "stream_reasoning", "tool_choice", "parallel_tool_calls"),
    }
)
"""What says how a chat is rendered, parsed and shown; the ids are the prompt already."""

_ONLY_CHATS = frozenset(
    {
        *("logit_bias", "seed", *(f"return_{kind}" for kind in REPLAY), "return_hidden_states", "cache_salt"),
        *("continue_final_message", "session_params", "reasoning", "reasoning_effort", "task", "data_parallel_rank"),
    }
)
"""What only a chat translates. Other members mean the same in both, or nothing."""


class ServerInfo(msgspec.Struct, frozen=True):
    """Of an engine's `/server_info`: how it streams, what it samples with, and what its chat parses replies with.
    `return_output_ids` is None where the engine does not know such an option (it came with the ids in streams)."""

    incremental_streaming_output: bool = False
    sampling_defaults: str = "model"
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    return_output_ids: bool | None = None

    @property
    def streams_ids(self) -> bool:
        """Does a stream of its chat have every token's id and logprob? Without a parser, those of tokens without text,
        such as the end, have no logprob."""
        has_parser = self.reasoning_parser is not None or self.tool_call_parser is not None
        return self.return_output_ids is not None and has_parser

    def takes(self, params: Fields) -> bool:
        """Would the chat sample with the same parameters?"""
        named = all(not is_null(params.get(name)) for name in MODEL_DEFAULTS)
        return self.incremental_streaming_output and (named or self.sampling_defaults == "openai")


def can_translate(params: Fields, tools: bytes | None) -> bool:
    """Does `/generate` generate what the chat would? A `strict` tool has a grammar, `base:adapter` an adapter."""
    set_ = {name: bytes(raw) for name, raw in params.items() if not is_null(raw)}
    if not _ONLY_CHATS.isdisjoint(set_) or set_.get("top_logprobs", b"0") != b"0":
        return False
    if b":" in set_.get("model", b"") and "lora_path" not in set_:
        return False
    return tools is None or b'"strict"' not in tools


def generate_body(params: Fields, ids: bytes, rid: str, *, offers_tools: bool) -> bytes:
    """The request; `ids` is the text of the prompt's."""
    sampling = {name: bytes(params[name]) for name in _SAMPLING if not is_null(params.get(name))}
    limits = [bytes(params[name]) for name in _LIMITS if not is_null(params.get(name))]
    sampling["max_new_tokens"] = limits[0] if limits else b"null"
    if not is_null(params.get("min_tokens")):
        sampling["min_new_tokens"] = bytes(params["min_tokens"])
    if offers_tools:
        sampling["skip_special_tokens"] = b"false"
    start = params.get("logprob_start_len", msgspec.Raw(b"0") if "prompt_logprobs" in params else None)
    known = {*_SAMPLING, *_LIMITS, "min_tokens", *_OF_CHATS}
    return join_object(
        {
            **{name: bytes(raw) for name, raw in params.items() if name not in known},
            "rid": msgspec.json.encode(rid),
            "sampling_params": join_object(sampling),
            "return_logprob": b"true",
            "logprob_start_len": b"-1" if is_null(start) else bytes(start or b""),
            "return_text_in_logprobs": b"true",
            "stream": b"true",
            "input_ids": b"[" + ids + b"]",
        }
    )


class _Event(msgspec.Struct):
    text: str = ""
    output_ids: list[int] = []
    meta_info: dict[str, msgspec.Raw] = {}
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None


_EVENT = msgspec.json.Decoder(_Event)
_FINISH = msgspec.json.Decoder(_Finish | None)
_COUNT = msgspec.json.Decoder(int)
_TRIPLES = msgspec.json.Decoder(list[tuple[msgspec.Raw, int, str]])
_ABORT = b'{"type":"abort","message":"The engine did not finish it"}'


class GenerateStream(EventReader):
    """One stream. `tokens` is how many have come, of which the request allows `limit`."""

    is_live = False
    has_calls = False

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.tokens = 0
        self._limit = limit
        self._texts: list[str] = []
        self._tokens: list[str] = []
        self._triples: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._meta: dict[str, bytes] = {}
        self._finish: _Finish | None = None

    @property
    def has_ended(self) -> bool:
        """Has the last token come?"""
        return self._finish is not None

    @property
    def was_aborted(self) -> bool:
        """Has the engine said that it was?"""
        return self._finish is not None and self._finish.type == "abort"

    def reply(self) -> bytes:
        """The whole reply. Raises BadStream if the stream has ended before."""
        self._require_whole(self.has_ended)
        assert self._finish is not None
        return self._whole(self._meta, self._finish)

    def begun(self) -> bytes:
        """The reply so far, as if the engine had aborted it after these tokens."""
        return self._whole({**self._meta, "finish_reason": _ABORT}, _Finish("abort"))

    def _read(self, data: bytes) -> None:
        event = _EVENT.decode(data)
        require_no_error(event.error)
        if self.has_ended:
            raise BadStream("the stream went on after its finish reason")
        meta = {name: bytes(raw) for name, raw in event.meta_info.items()}
        finish = _FINISH.decode(meta.get("finish_reason", b"null"))
        raw = meta.pop("output_token_logprobs", b"[]").strip()
        triples, ids, text = _TRIPLES.decode(raw), event.output_ids, event.text
        if finish is not None and finish.type == "abort" and "prompt_tokens" not in meta:
            new = max(_COUNT.decode(meta.get("completion_tokens", b"0")) - self.tokens, 0)
            triples, ids, text = triples[:new], ids[:new], self._without_repeat(text)
            raw = b"[" + b",".join(b"[%b,%d,%b]" % (bytes(p), i, msgspec.json.encode(t)) for p, i, t in triples) + b"]"
        if [token for _, token, _ in triples] != ids:
            raise BadStream("an event has other logprobs than ids: is --incremental-streaming-output on?")
        if triples:
            self._triples.append(raw[1:-1])
            self._tokens += [token for _, _, token in triples]
            self._logprobs += [_entry(bytes(logprob), token) for logprob, _, token in triples]
        self.tokens += len(triples)
        require_within(self.tokens, self._limit)
        if finish is not None and finish.type == "error":
            raise CutStream(told_error(None))
        self._texts.append(text)
        self._meta, self._finish = self._meta | meta, finish

    def _without_repeat(self, text: str) -> str:
        """What is new of a text behind which all text comes again."""
        before = "".join(self._texts)
        new = text[: max(len(text) - len(before), 0) // 2]
        if text != new + before + new:
            raise BadStream("an aborted generation repeats another text than it had")
        return new

    def _text(self, finish: _Finish) -> str:
        """Without a stop string, whose beginning may have been sent before it was known to be one."""
        text = "".join(self._texts)
        if not isinstance(finish.matched, str) or text.endswith(finish.matched):
            return text
        kept = "".join(self._tokens).partition(finish.matched)[0]
        return kept if text.startswith(kept) else text

    def _whole(self, meta: Mapping[str, bytes], finish: _Finish) -> bytes:
        prompt = _COUNT.decode(meta.get("prompt_tokens", b"0"))  # 0 as in a chat that was never counted
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.tokens,
            "completion_tokens": self.tokens,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
            "reasoning_tokens": _COUNT.decode(meta.get("reasoning_tokens", b"0")),
        }
        choice = {
            "index": b"0",
            "message": msgspec.json.encode({"role": "assistant", "content": self._text(finish)}),
            "logprobs": b'{"content":[' + b",".join(self._logprobs) + b"]}",
            "finish_reason": msgspec.json.encode(finish.type),
            "matched_stop": msgspec.json.encode(finish.matched),
            "meta_info": join_object({**meta, "output_token_logprobs": b"[" + b",".join(self._triples) + b"]"}),
        }
        root = {
            "id": meta.get("id", b"null"),
            "object": b'"chat.completion"',
            "choices": b"[" + join_object(choice) + b"]",
            "usage": msgspec.json.encode(usage),
            "metadata": join_object(
                {name: meta[name] for name in ("weight_version", "weight_versions") if name in meta}
            ),
        }
        return join_object(root)


def _entry(logprob: bytes, text: str) -> bytes:
    """A token as the chat shows it: its bytes are those of its text."""
    token, spelled = msgspec.json.encode(text), msgspec.json.encode(list(text.encode()))
    return b'{"token":%b,"bytes":%b,"logprob":%b,"top_logprobs":[]}' % (token, spelled, logprob)
