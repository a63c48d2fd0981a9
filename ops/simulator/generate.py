"""The policy: decides what the simulated model answers, and cuts answers at limits, stop strings and aborts."""

from __future__ import annotations

import hashlib
import json
import random
import re
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import msgspec

from ops.simulator.arguments import draw_arguments
from ops.simulator.config import Config
from ops.simulator.lru import Lru
from ops.simulator.prose import Prose
from ops.simulator.template import Conversation, assistant_text
from ops.simulator.tokenizer import IM_END, Tokenizer
from ops.simulator.wire import ChatRequest, Request, Sim, Tool

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_SECOND_CALL_SHARE = 0.25
_CUT_TRIES = 16


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the reply; ``arguments`` is JSON text, unless a request ordered another."""

    id: str | int | None
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A sampled answer: the ids, and the message parsed from them.

    ``ids`` ends with the end token if ``finish`` is ``stop`` or ``tool_calls``; ``text`` is their text without it. If a
    stop string ended the answer, it is in ``stop_text``; then ``ids`` ends with the token that completes it, and
    ``text`` ends before it. ``cuts`` is the number of aborts that cut the answer before this rest of it, ``before`` the
    number of its tokens that were in the prompt.
    """

    text: str
    content: str
    reasoning: str | None
    calls: tuple[Call, ...]
    ids: list[int]
    finish: str
    logprob_offset: int
    digest: str
    stop_text: str | None = None
    cuts: int = 0
    before: int = 0

    def saying(self, text: str, planned: tuple[Call, ...], **changes: Any) -> Draft:
        """With another text, which is parsed anew."""
        reasoning, content, calls = parse(text, planned)
        return replace(self, text=text, content=content, reasoning=reasoning, calls=calls, **changes)


class Policy:
    """Draws answers from a seed: the same messages get the same answer at the same repetition, and always at
    temperature 0."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prose = Prose(tokenizer, config.seed)
        self._seed = config.seed.to_bytes(16, "little", signed=True)
        self._answers_given: Lru[bytes, int] = Lru(200_000)
        self._unfinished: Lru[bytes, Draft] = Lru(10_000)
        self._end = tokenizer.special_ids[IM_END]
        self._glue = {
            True: self._glue_ids("<tool_call>"),
            False: self._glue_ids("A"),
        }
        self._think = tokenizer.ids("<think>\n")
        self._newline = tokenizer.ids("\n")

    def _glue_ids(self, follower: str) -> list[int]:
        """Ids between reasoning and answer, which depend on what follows."""
        return self._tokenizer.ids("\n</think>\n\n" + follower)[:-1]

    def forget(self) -> None:
        """Forget how often each conversation was answered, and the rests of aborted answers."""
        self._answers_given.clear()
        self._unfinished.clear()

    def draft(self, conversation: Conversation, request: Request, continuing: bool) -> Draft:
        """Sample an answer to ``conversation`` within ``request``'s limits. The arguments are those of `whole`."""
        return self.within(self.whole(conversation, request, continuing), request)

    def whole(self, conversation: Conversation, request: Request, continuing: bool) -> Draft:
        """Sample an answer to ``conversation``. If it exceeds ``request``'s limit, it is generated up to one token
        more.

        ``continuing``: the prompt ends inside an assistant turn.
        """
        repetition = 0
        if request.temperature != 0:
            repetition = self._answers_given.get(conversation.digest) or 0
            self._answers_given.put(conversation.digest, repetition + 1)
        key = hashlib.blake2b(
            self._seed + conversation.digest + repetition.to_bytes(8, "little"), digest_size=16
        ).digest()
        rng = random.Random(key)
        sim = request.sim or Sim()
        calls: tuple[Call, ...] = ()
        if isinstance(request, ChatRequest) and not continuing:
            calls = self._calls(conversation, request, sim, rng)
            calls = (
                *(replace(call, id=given) for call, given in zip(calls, sim.call_ids, strict=False)),
                *calls[len(sim.call_ids) :],
            )
        return self._compose(sim, calls, rng, limit_of(request), continuing, key.hex())

    def within(self, draft: Draft, request: Request) -> Draft:
        """``draft``, cut at ``request``'s limits."""
        sim, limit = request.sim or Sim(), limit_of(request)
        if limit is not None and len(draft.ids) > limit:
            draft = self.cut(draft, limit, "length", exact=True)
        if sim.finish_reason == "abort":
            return self.cut(draft, len(draft.ids) // 2, "abort")
        if sim.finish_reason == "length" and draft.finish != "length":
            return self.cut(draft, len(draft.ids) - 1, "length", exact=True)
        return replace(draft, finish=sim.finish_reason) if sim.finish_reason else draft

    def _calls(
        self, conversation: Conversation, request: ChatRequest, sim: Sim, rng: random.Random
    ) -> tuple[Call, ...]:
        if sim.calls is not None:
            return tuple(Call(_call_id(rng), call.name, _text_of(call.arguments)) for call in sim.calls)
        tools = conversation.toolbox.tools
        if not tools or sim.text is not None or sim.tool_calls is False or request.tool_choice == "none":
            return ()
        if isinstance(request.tool_choice, dict):
            wanted = request.tool_choice.get("function")
            name = wanted.get("name") if isinstance(wanted, dict) else None
            tools = tuple(tool for tool in tools if tool.function.name == name) or tools
        forced = sim.tool_calls or request.tool_choice == "required" or isinstance(request.tool_choice, dict)
        task = random.Random(self._seed + conversation.task_digest)
        if not forced and conversation.tool_results >= task.randint(1, self._config.max_turn_tool_results):
            return ()
        count = 2 if rng.random() < _SECOND_CALL_SHARE else 1
        return tuple(self._call(rng.choice(tools), rng) for _ in range(count))

    @staticmethod
    def _call(tool: Tool, rng: random.Random) -> Call:
        arguments = json.dumps(draw_arguments(tool.function.parameters, rng), ensure_ascii=False)
        return Call(_call_id(rng), tool.function.name, arguments)

    def _compose(
        self,
        sim: Sim,
        calls: tuple[Call, ...],
        rng: random.Random,
        limit: int | None,
        continuing: bool,
        digest: str,
    ) -> Draft:
        call_texts = [(call.name, call.arguments) for call in calls]
        tail: list[int] = []
        if calls:
            tail = self._tokenizer.ids(assistant_text("", None, call_texts))
        wanted = sim.completion_tokens
        total = wanted if wanted is not None else rng.randint(40, 60)
        offset = rng.getrandbits(30)
        if sim.text is not None:
            return self._exact(sim, sim.text, calls, offset, digest)
        whole = total if limit is None or total <= limit else limit + 1
        room = max(whole - 1 - len(tail), 0)
        has_reasoning = bool(sim.reasoning) if sim.reasoning is not None else rng.random() < self._config.reasoning
        overhead = len(self._think) + len(self._glue[False])
        reasoning, reasoning_ids = None, list[int]()
        if has_reasoning and not continuing and room >= overhead + 6:
            reasoning, reasoning_ids = self._prose.draw(rng, (room - overhead) // 3)
            room -= len(reasoning_ids) + overhead
        if calls and (room < 2 or (wanted is None and rng.random() < 0.5)):
            room = 0
        if calls and room:
            room -= len(self._newline)
        content, content_ids = self._prose.draw(rng, room, opening=not continuing)
        ids = [*self._think, *reasoning_ids, *self._glue[bool(calls) and not content]] if reasoning else []
        ids += content_ids
        if calls:
            ids += [*self._newline, *tail] if content else tail
        text = assistant_text(content, reasoning, call_texts)
        self._tokenizer.remember(text, ids)
        finish = "tool_calls" if calls else "stop"
        return Draft(text, content, reasoning, calls, [*ids, self._end], finish, offset, digest)

    def _exact(self, sim: Sim, text: str, calls: tuple[Call, ...], offset: int, digest: str) -> Draft:
        reasoning = "Thinking it over" if sim.reasoning is True else sim.reasoning or None
        whole = assistant_text(text, reasoning, [(call.name, call.arguments) for call in calls])
        ids = [*self._tokenizer.encode(whole).ids(), self._end]
        return Draft(whole, text, reasoning, calls, ids, "tool_calls" if calls else "stop", offset, digest)

    def cut(self, draft: Draft, count: int, finish: str, exact: bool = False) -> Draft:
        """``draft`` after ``count`` tokens.

        Without ``exact``, up to _CUT_TRIES tokens fewer, if that makes the ids the canonical encoding of their text (an
        abort may come at any token).
        """
        kept = max(0, min(count, len(draft.ids)))
        if kept and draft.ids[kept - 1] == self._end:
            if exact or finish != "abort":
                return replace(draft, ids=draft.ids[:kept], finish=finish)
            kept -= 1
        ids = draft.ids[:kept]
        text = self._tokenizer.decode(ids)
        for fewer in range(0 if exact else min(_CUT_TRIES, kept)):
            shorter = draft.ids[: kept - fewer]
            shorter_text = self._tokenizer.decode(shorter)
            if self._tokenizer.ids(shorter_text) == shorter:
                ids, text = shorter, shorter_text
                break
        return draft.saying(text, draft.calls, ids=ids, finish=finish, stop_text=None)

    def leave(self, prompt: bytes, whole: Draft, kept: int) -> None:
        """Store the rest of ``whole``, which an abort cut after ``kept`` tokens, for a request that continues there."""
        rest = replace(self.rest(whole, kept), cuts=whole.cuts + 1)
        self._unfinished.put(_digest(prompt + array("i", whole.ids[:kept]).tobytes()), rest)

    def rest(self, whole: Draft, kept: int) -> Draft:
        """``whole`` without its first ``kept`` tokens."""
        ids = whole.ids[kept:]
        text = self._tokenizer.decode(ids[:-1] if ids[-1:] == [self._end] else ids)
        calls = whole.calls[len(whole.calls) - text.count("<tool_call>") :]
        offset, before = whole.logprob_offset + kept, whole.before + kept
        rest = whole.saying(text, calls, ids=ids, logprob_offset=offset, before=before)
        if whole.finish in ("stop", "tool_calls"):
            rest = replace(rest, finish="tool_calls" if rest.calls else "stop")
        return rest

    def greedy_rest(self, conversation: Conversation, request: ChatRequest, output: list[int]) -> Draft | None:
        """The rest of the answer at temperature 0, if it begins with ``output``; no engine has to know it."""
        limit = limit_of(request)
        longer = None if limit is None else limit + len(output)
        wanted = msgspec.structs.replace(request, max_tokens=longer, max_completion_tokens=None)
        whole = self.whole(conversation, wanted, continuing=False)
        return self.rest(whole, len(output)) if whole.ids[: len(output)] == output else None

    def unfinished(self, prompt: bytes) -> Draft | None:
        """The rest of an answer that an abort cut, if ``prompt`` ends where it was cut."""
        return self._unfinished.get(_digest(prompt))

    def stopped(self, draft: Draft, stops: list[str]) -> Draft:
        """``draft`` up to the first stop string in its text, cut as engines do."""
        ids = draft.ids[:-1] if draft.ids[-1:] == [self._end] else draft.ids
        pieces = [self._tokenizer.token_bytes[token] for token in ids]
        whole = b"".join(pieces)
        found = [(whole.find(stop.encode()), stop) for stop in stops if stop and stop.encode() in whole]
        if not found:
            return draft
        at, stop = min(found)
        ends = list(accumulate(map(len, pieces)))
        count = bisect_left(ends, at + len(stop.encode())) + 1
        text = whole[:at].decode("utf-8", "replace")
        return draft.saying(text, draft.calls, ids=ids[:count], finish="stop", stop_text=stop)


def limit_of(request: Request) -> int | None:
    limit = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    return request.max_tokens if limit is None else limit


def _call_id(rng: random.Random) -> str:
    return f"call_{rng.getrandbits(96):024x}"


def _text_of(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _digest(ids: bytes) -> bytes:
    return hashlib.blake2b(ids, digest_size=16).digest()


def parse(text: str, planned: tuple[Call, ...]) -> tuple[str | None, str, tuple[Call, ...]]:
    """The reasoning, content and complete tool calls of a text that may be cut.

    If a call is cut, all calls stay in the content as text, as in engines when their tool parser fails.
    """
    reasoning: str | None = None
    if text.startswith("<think>"):
        reasoning, _, text = text.removeprefix("<think>").removeprefix("\n").partition("\n</think>")
        text = text.removeprefix("\n\n").removeprefix("\n")
    found = _CALL.findall(text)
    if not found or len(found) != text.count("<tool_call>"):
        return reasoning or None, text, ()
    content = text[: text.index("<tool_call>")].removesuffix("\n")
    return reasoning or None, content, planned[: len(found)]
