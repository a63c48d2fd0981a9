"""SGLang's native ``/generate`` with ids in, streamed with ``--incremental-streaming-output``, and its parsers' routes.

Each event has the share of text, ids and logprobs that is new, as in SGLang 0.5.23; counts are those so far.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ops.simulator.generate import parse
from ops.simulator.generation import DONE, EVENT_STREAM, Generation, ReplyWriter, event
from ops.simulator.sglang import finish_of, queued_info, speculative_of
from ops.simulator.wire import BadRequest, ChatRequest, Reply, Sim, json_reply

# The arguments are taken as the model wrote them, whether they are JSON or not.
_CALL = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)\}', re.DOTALL)
CHUNK = 8
"""Tokens in an event of a request that does not say it."""


class Sampling(Struct):
    temperature: float | None = None
    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None


class GenerateRequest(Struct):
    """The body of ``/generate``."""

    input_ids: Raw
    sampling_params: Sampling
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    logprob_start_len: int = -1
    stream: bool = False
    rid: str | None = None
    lora_path: str | None = None
    sim: Sim | None = None

    def as_chat(self) -> ChatRequest:
        """The chat with the same ids. Raises :class:`BadRequest` for what this simulator does not do."""
        if not (self.stream and self.return_logprob and self.return_text_in_logprobs):
            raise BadRequest("this simulator's /generate streams logprobs with their text, and nothing else")
        sampling = self.sampling_params
        return ChatRequest(
            messages=[],
            input_ids=self.input_ids,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop=sampling.stop,
            stream=True,
            logprobs=True,
            rid=self.rid,
            lora_path=self.lora_path,
            sim=self.sim,
            logprob_start_len=self.logprob_start_len,
        )


class Parsed(Struct):
    """The body of ``/separate_reasoning`` and of ``/parse_function_call``."""

    text: str
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    tools: list[dict[str, Any]] = []


def stream(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    draft = generation.draft
    size = generation.sim.chunk_tokens or CHUNK
    numbers, left = writer.logprobs(draft), draft.text
    texts = writer.texts_of(draft.ids, size)
    starts = range(0, max(len(draft.ids), 1), size)
    prompt, first = list(generation.prompt.ids()), generation.request.logprob_start_len
    given: dict[str, Raw] = {}
    if first >= 0:
        triples = writer.triples_of(prompt[first:], [b"null", *writer.prompt_numbers(prompt[first + 1 :])])
        given = {"input_token_logprobs": Raw(triples)}
    events = []
    for start, text in zip_longest(starts, texts[: len(starts)], fillvalue=""):
        at = int(start)
        if generation.queued and not draft.ids:
            break
        ids, is_last = draft.ids[at : at + size], at == starts[-1]
        delta = left if is_last else text[: len(left)]
        left = left[len(delta) :]
        meta = {
            "id": generation.id,
            "finish_reason": finish_of(generation, writer) if is_last and not generation.queued else None,
            "prompt_tokens": generation.prompt.count,
            "weight_version": generation.weight_version,
            "output_token_logprobs": Raw(writer.triples_of(ids, numbers[at : at + size])),
            "completion_tokens": at + len(ids),
            "cached_tokens": generation.cached_tokens,
            **given,
            **(speculative_of(generation) if is_last else {}),
        }
        events.append(event({"text": delta, "output_ids": ids, "meta_info": meta}))
    if generation.queued:  # what came is repeated: all text and logprobs, and the last id
        info = queued_info(generation, Raw(writer.triples_of(draft.ids, numbers)))
        events.append(event({"text": draft.text, "output_ids": draft.ids[-1:], "meta_info": info}))
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
