"""The policy: decides what the simulated model answers, and cuts answers at limits, stop strings and aborts."""

from __future__ import annotations

import json
import random
import re
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import msgspec

from ops.simulator.template import Conversation, assistant_text, digest_of
from ops.simulator.tokenizer import IM_END, SPICE, WORDS, Lru, Tokenizer
from ops.simulator.wire import ChatRequest, Config, Request, Sim

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_SECOND_CALL_SHARE = 0.25
_MOST_TOOL_RESULTS = 3
"""The policy calls no more tools after a seeded number of results from 1 to this."""

_CUT_TRIES = 16

_BLOCK_TOKENS = 8
_BLOCKS = 512
_SPICE_SHARE = 0.12

_EXOTIC = ("Zürich", "東京 🚀", 'a "quoted" word', "line\nbreak", "back\\slash", "мир")
_MAX_DEPTH = 6


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
        # The ids between reasoning and answer depend on what follows.
        glue = {True: "<tool_call>", False: "A"}
        self._glue = {calls: tokenizer.ids("\n</think>\n\n" + first)[:-1] for calls, first in glue.items()}
        self._think = tokenizer.ids("<think>\n")
        self._newline = tokenizer.ids("\n")

    def forget(self) -> None:
        """Forget how often each conversation was answered, and the rests of aborted answers."""
        self._answers_given.clear()
        self._unfinished.clear()

    def whole(self, conversation: Conversation, request: Request, continuing: bool) -> Draft:
        """Sample an answer to ``conversation``. If it exceeds ``request``'s limit, it is generated up to one token
        more.

        ``continuing``: the prompt ends inside an assistant turn.
        """
        repetition = 0
        if request.temperature != 0:
            repetition = self._answers_given.get(conversation.digest) or 0
            self._answers_given.put(conversation.digest, repetition + 1)
        key = digest_of(self._seed + conversation.digest + repetition.to_bytes(8, "little"))
        rng = random.Random(key)
        sim = request.sim or Sim()
        calls: tuple[Call, ...] = ()
        if isinstance(request, ChatRequest) and not continuing:
            calls = self._calls(conversation, request, sim, rng)
            named = [replace(call, id=given) for call, given in zip(calls, sim.call_ids, strict=False)]
            calls = (*named, *calls[len(named) :])
        return self._compose(sim, calls, rng, request.limit, continuing, key.hex())

    def within(self, draft: Draft, request: Request) -> Draft:
        """``draft``, cut at ``request``'s limits."""
        sim, limit = request.sim or Sim(), request.limit
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
            return tuple(_called(rng, call.name, call.arguments) for call in sim.calls)
        tools = conversation.toolbox.tools
        if not tools or sim.text is not None or sim.tool_calls is False or request.tool_choice == "none":
            return ()
        if isinstance(request.tool_choice, dict):
            wanted = request.tool_choice.get("function")
            name = wanted.get("name") if isinstance(wanted, dict) else None
            tools = tuple(tool for tool in tools if tool.function.name == name) or tools
        forced = sim.tool_calls or request.tool_choice == "required" or isinstance(request.tool_choice, dict)
        task = random.Random(self._seed + conversation.task_digest)
        if not forced and conversation.tool_results >= task.randint(1, _MOST_TOOL_RESULTS):
            return ()
        count = 2 if rng.random() < _SECOND_CALL_SHARE else 1
        calls = []
        for _ in range(count):
            function = rng.choice(tools).function
            arguments = draw_arguments(function.parameters, rng)
            calls.append(_called(rng, function.name, arguments))
        return tuple(calls)

    def _compose(
        self, sim: Sim, calls: tuple[Call, ...], rng: random.Random, limit: int | None, continuing: bool, digest: str
    ) -> Draft:
        call_texts, finish = [(call.name, call.arguments) for call in calls], "tool_calls" if calls else "stop"
        tail = self._tokenizer.ids(assistant_text("", None, call_texts)) if calls else []
        wanted = sim.completion_tokens
        total = wanted if wanted is not None else rng.randint(40, 60)
        offset = rng.getrandbits(30)
        if sim.text is not None:
            reasoning = "Thinking it over" if sim.reasoning is True else sim.reasoning or None
            text = assistant_text(sim.text, reasoning, call_texts)
            ids = [*self._tokenizer.encode(text).ids(), self._end]
            return Draft(text, sim.text, reasoning, calls, ids, finish, offset, digest)
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
        return Draft(text, content, reasoning, calls, [*ids, self._end], finish, offset, digest)

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
        self._unfinished.put(digest_of(prompt + array("i", whole.ids[:kept]).tobytes()), rest)

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
        longer = None if request.limit is None else request.limit + len(output)
        wanted = msgspec.structs.replace(request, max_tokens=longer, max_completion_tokens=None)
        whole = self.whole(conversation, wanted, continuing=False)
        return self.rest(whole, len(output)) if whole.ids[: len(output)] == output else None

    def unfinished(self, prompt: bytes) -> Draft | None:
        """The rest of an answer that an abort cut, if ``prompt`` ends where it was cut."""
        return self._unfinished.get(digest_of(prompt))

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


def _called(rng: random.Random, name: str, arguments: str | dict[str, Any]) -> Call:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(f"call_{rng.getrandbits(96):024x}", name, text)


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


Unit = tuple[str, tuple[int, ...]]


class Prose:
    """Draws text from prepared blocks and single-token words."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        rng = random.Random(f"prose {seed}")
        self._openers = self._units(tokenizer, [word.capitalize() for word in WORDS])
        self._words = self._units(tokenizer, [" " + word for word in WORDS])
        self._spice = self._units(tokenizer, list(SPICE), single=False)
        self._blocks = [self._block(rng) for _ in range(_BLOCKS)]

    @staticmethod
    def _units(tokenizer: Tokenizer, texts: list[str], single: bool = True) -> list[Unit]:
        units = [(text, tuple(tokenizer.ids(text))) for text in texts]
        return [unit for unit in units if not single or len(unit[1]) == 1]

    def _block(self, rng: random.Random) -> Unit:
        """A unit of exactly eight tokens that begins and ends with a word."""
        text, ids = rng.choice(self._words)
        while len(ids) < _BLOCK_TOKENS:
            spice = rng.choice(self._spice) if rng.random() < _SPICE_SHARE else None
            word = rng.choice(self._words)
            if spice is not None and len(ids) + len(spice[1]) < _BLOCK_TOKENS:
                text, ids = text + spice[0], ids + spice[1]
            text, ids = text + word[0], ids + word[1]
        return text, ids

    def draw(self, rng: random.Random, count: int, opening: bool = True) -> tuple[str, list[int]]:
        """Text of ``count`` tokens, and their ids. With ``opening`` it begins a text, else it continues one."""
        texts: list[str] = []
        ids: list[int] = []
        if opening and count:
            text, first = rng.choice(self._openers)
            texts.append(text)
            ids.extend(first)
        blocks, rest = divmod(count - len(ids), _BLOCK_TOKENS)
        for text, unit in [*rng.choices(self._blocks, k=blocks), *rng.choices(self._words, k=rest)]:
            texts.append(text)
            ids.extend(unit)
        return "".join(texts), ids


def draw_arguments(schema: dict[str, Any] | None, rng: random.Random) -> dict[str, Any]:
    """An object that fits ``schema``, for the usual keywords.

    Supported: type, properties, required, enum, const, anyOf, oneOf, items, bounds of numbers, lengths, and local
    ``$ref``. Patterns and formats are ignored.
    """
    root = schema or {}
    value = _draw(root if "properties" in root or "$ref" in root else {"type": "object"}, root, rng, 0)
    return value if isinstance(value, dict) else {}


def _draw(schema: dict[str, Any], root: dict[str, Any], rng: random.Random, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return None
    if "$ref" in schema:
        target: Any = root
        for step in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(step, {}) if isinstance(target, dict) else {}
        return _draw(target, root, rng, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            return _draw(rng.choice(schema[keyword]), root, rng, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "object":
        required, properties = schema.get("required", ()), schema.get("properties", {})
        return {
            name: _draw(part, root, rng, depth + 1)
            for name, part in properties.items()
            if name in required or rng.random() < 0.5
        }
    if kind == "array":
        low = int(schema.get("minItems", 0))
        count = rng.randint(low, max(low, min(int(schema.get("maxItems", low + 2)), low + 2)))
        return [_draw(schema.get("items", {}), root, rng, depth + 1) for _ in range(count)]
    if kind == "string":
        text = rng.choice(_EXOTIC) if rng.random() < 0.15 else " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
        while len(text) < int(schema.get("minLength", 0)):
            text += rng.choice(WORDS)
        return text[: schema.get("maxLength")]
    if kind in ("integer", "number"):
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0 if high is None else high - 100))
        high = low + 100 if high is None else high
        if kind == "number":
            return float(low + (high - low) * rng.uniform(0.01, 0.99))
        first, last = int(low) + ("exclusiveMinimum" in schema), int(high) - ("exclusiveMaximum" in schema)
        return rng.randint(first, max(first, last))
    return rng.random() < 0.5 if kind == "boolean" else None
