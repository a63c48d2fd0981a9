"""SGLang's native ``/generate``, and its parsers' routes, as in SGLang 0.5.23."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ops.simulator import sglang
from ops.simulator.generate import parse
from ops.simulator.generation import DONE, EVENT_STREAM, Generation, ReplyWriter, encode, event
from ops.simulator.wire import BadRequest, ChatRequest, Reply, Sim, json_reply

# The arguments are taken as the model wrote them, whether they are JSON or not.
_CALL = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)\}', re.DOTALL)
CHUNK = 8
"""Tokens in an event of a request that does not say it."""


class Sampling(Struct, frozen=True):
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None


class GenerateRequest(Struct):
    """The body of ``/generate``."""

    text: str | None = None
    input_ids: Raw = Raw(b"")
    sampling_params: Sampling = Sampling()
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    stream: bool = False
    rid: str | None = None
    lora_path: str | None = None
    sim: Sim | None = None

    def as_chat(self) -> ChatRequest:
        """The chat with the same prompt. Raises :class:`BadRequest`."""
        if self.text is None and not bytes(self.input_ids):
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        sampling = self.sampling_params
        return ChatRequest(
            messages=[],
            input_ids=self.input_ids,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=sampling.stop,
            stream=self.stream,
            logprobs=self.return_logprob,
            top_logprobs=self.top_logprobs_num,
            return_routed_experts=self.return_routed_experts,
            routed_experts_start_len=self.routed_experts_start_len,
            rid=self.rid,
            lora_path=self.lora_path,
            sim=self.sim,
        )


class Parsed(Struct):
    """The body of ``/separate_reasoning`` and of ``/parse_function_call``."""

    text: str
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    tools: list[dict[str, Any]] = []


def error(message: str) -> Reply:
    """What ``/generate`` answers where it refuses a request that it could read."""
    return json_reply({"error": {"message": message}}, 400)


def streamed_error(message: str) -> Reply:
    """The same in a stream, whose status is 200."""
    fields = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    return Reply((event({"error": fields}), DONE), content_type=EVENT_STREAM)


def render(generation: Generation[ChatRequest], writer: ReplyWriter, asked: GenerateRequest) -> Reply:
    """The whole reply."""
    draft, numbers = generation.draft, writer.logprobs(generation.draft)
    triples = writer.triples(draft.ids, numbers, asked.return_text_in_logprobs) if asked.return_logprob else None
    tops = writer.alternatives(draft.ids, numbers, asked.top_logprobs_num) if triples and asked.top_logprobs_num else []
    wants_experts = asked.return_routed_experts and not generation.queued
    experts = writer.experts(generation, wants_experts, asked.routed_experts_start_len)
    of_prompt = _of_prompt(generation, writer, asked)
    meta = sglang.meta_info(generation, writer, triples, tops, experts, of_prompt=of_prompt)
    head = b'{"text":%b,"output_ids":%b,"meta_info":' % (encode(draft.text), encode(draft.ids))
    return Reply(writer.padded([head, *meta], generation.sim.body_bytes))


def _of_prompt(generation: Generation[ChatRequest], writer: ReplyWriter, asked: GenerateRequest) -> bytes:
    """The triples of the prompt's tokens from the first asked for."""
    first = asked.logprob_start_len
    if first < 0:
        return b"[]"
    prompt = list(generation.prompt.ids())
    numbers = [b"null", *writer.prompt_numbers(prompt[first + 1 :])]
    return writer.triples(prompt[first:], numbers, asked.return_text_in_logprobs)


def stream(generation: Generation[ChatRequest], writer: ReplyWriter, asked: GenerateRequest) -> Reply:
    """Each event has what is new or, without ``--incremental-streaming-output``, all so far, and counts so far."""
    draft = generation.draft
    size = generation.sim.chunk_tokens or CHUNK
    numbers, texts = writer.logprobs(draft), writer.texts_of(draft.ids, size)
    starts = range(0, max(len(draft.ids), 1), size)
    of_prompt = _of_prompt(generation, writer, asked)
    events, said = [], ""

    def logprobs(start: int, end: int) -> bytes | None:
        if not asked.return_logprob:
            return None
        return writer.triples(draft.ids[start:end], numbers[start:end], asked.return_text_in_logprobs)

    for start, text in zip_longest(starts, texts[: len(starts)], fillvalue=""):
        at = int(start)
        if generation.queued and not draft.ids:
            break
        end, is_last = min(at + size, len(draft.ids)), at == starts[-1]
        delta = draft.text[len(said) :] if is_last else text[: len(draft.text) - len(said)]
        said += delta
        first, shown = (at, delta) if writer.config.incremental else (0, said)
        finish = sglang.finish_of(generation, writer) if is_last and not generation.queued else None
        meta = [
            sglang.begun_info(generation, end, finish),
            sglang.logprob_lists(logprobs(first, end), end, of_prompt),
            sglang.counted_info(generation, end),
        ]
        if is_last and asked.return_routed_experts and not generation.queued:
            rows = writer.experts(generation, True, asked.routed_experts_start_len) or b"null"
            meta += [b',"routed_experts":', rows]
        ended = {"e2e_latency": generation.seconds, **sglang.speculative_of(generation)} if finish else {}
        sent = {} if at else {"response_sent_to_client_ts": sglang.SENT}
        meta.append(b"," + encode({"dp_rank": 0, **ended, **sent})[1:])
        info = Raw(b"".join(meta))
        events.append(event({"text": shown, "output_ids": draft.ids[first:end], "meta_info": info}))
    if generation.queued:  # what came is repeated: all text and logprobs, and with increments the last id alone
        lists = sglang.logprob_lists(logprobs(0, len(draft.ids)), len(draft.ids), of_prompt)
        ids = draft.ids[-1:] if writer.config.incremental else draft.ids
        info = Raw(sglang.queued_info(generation, lists))
        events.append(event({"text": draft.text, "output_ids": ids, "meta_info": info}))
    return Reply((*events, DONE), content_type=EVENT_STREAM)


async def separate_reasoning(body: bytes, query: dict[str, str]) -> Reply:
    text = msgspec.json.decode(body, type=Parsed).text
    reasoning, content, _ = parse(text, ())
    if not text.startswith("<think>"):
        return json_reply({"reasoning_text": "", "text": text})
    rest = text.partition("</think>")[2].removeprefix("\n\n").removeprefix("\n")
    return json_reply({"reasoning_text": reasoning or "", "text": rest or content})


async def parse_function_call(body: bytes, query: dict[str, str]) -> Reply:
    text = msgspec.json.decode(body, type=Parsed).text
    content, *rest = text.split("<tool_call>")
    calls = []
    for number, one in enumerate(rest):
        called, end, _ = one.partition("</tool_call>")
        if not end:
            return json_reply({"normal_text": text, "calls": []})
        written = _CALL.fullmatch(called.strip())
        if written is None:
            return json_reply({"normal_text": text, "calls": []})
        name, arguments = written.groups()
        calls.append({"tool_index": number, "name": msgspec.json.decode(name, type=str), "parameters": arguments})
    return json_reply({"normal_text": content.removesuffix("\n"), "calls": calls})
