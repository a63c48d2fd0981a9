"""One family: every prompt of random conversations, block by block beside the engine's own rendering.

A block is a message: the ids from one opening special token to before the next. Every block that no generation is in
must be equal, id by id. A block with a generation must be the generation prompt, the sampled ids, and what of the
junction was not sampled; where it is not what the engine renders, exactly one of these must be the reason:

    spelling    the text is the same, the policy spelled it with other ids (if only where the prompt ends)
    reasoning   the text is the same but for the reasoning, which the template drops or shows empty
    cut         the generation ended without an end token; less reasoning, the text is the same
    other stop  it ended with another stop token, which stays; less that and the reasoning, the text is the same
"""

from __future__ import annotations

import itertools
import random
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from app.tito.prompts import Prompts
from tests.tools.tito_check.conversations import Kind, Message, Reply, Talk
from tests.tools.tito_check.engine import Engine

_REASONING = re.compile(r"\s*<think>.*?(</think>|\Z)\s*", re.DOTALL)
_TAIL = 64


class Mismatch(Exception):
    """A prompt is not what the engine renders, and no rule says that it may differ."""


@dataclass(frozen=True)
class Layout:
    """How a family's ids divide into messages: `openings` begin one, `tail` is behind an assistant's."""

    openings: frozenset[int]
    tail: list[int]
    role_stops: frozenset[int]


@dataclass
class State:
    """A session as Turnlog stores it. `replies[i]` was sampled at `starts[i]`, less a trimmed end."""

    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def copy(self) -> State:
        return State(list(self.messages), list(self.ids), list(self.starts), list(self.replies))


class Check:
    """Conversations with one tokenizer.

    `tally` counts, over all prompts: the `prompts` that are the engine's to the last id, the messages that nothing was
    generated in (`others`, all equal), and those with a generation by how they compare.
    """

    def __init__(self, prompts: Prompts, tokenizer: Any, kind: Kind, layout: Layout, pinned: dict[str, Any]) -> None:
        self._prompts = prompts
        self._engine = Engine(tokenizer)
        self._tokenizer = tokenizer
        self._kind = kind
        self._layout = layout
        self._pinned = pinned
        self.conversations = 0
        self.turns = 0
        self.tally: Counter[str] = Counter()

    def conversation(self, seed: str) -> None:
        """Raises Mismatch."""
        self.conversations += 1
        rng = random.Random(seed)
        talk = Talk(rng, self._kind)
        state = State()
        history: list[State] = []
        for _ in range(rng.randint(2, 8)):
            new = talk.following(state.replies[-1].message) if state.replies else talk.opening()
            self._turn(state, new, talk)
            history.append(state.copy())
            if len(history) > 1 and rng.random() < 0.2:  # a retry discards the newest turns
                del history[-rng.randint(1, len(history) - 1) :]
                state = history[-1].copy()
        self._compare_session(state, talk)

    def _turn(self, state: State, new: list[Message], talk: Talk) -> None:
        prompt = self._prompt(state, new, talk)
        rendered = self._engine.ids([*state.messages, *new], talk.tools, {**talk.arguments, **self._pinned})
        self._compare(prompt, rendered, state)
        reply = talk.reply(lambda message: self._canonical(message, talk), self._encode)
        if reply.how == "cut":
            reply = Reply(self._parsed(prompt, reply.ids), reply.ids, "cut")
        state.messages += [*new, reply.message]
        state.starts.append(len(prompt))
        state.replies.append(reply)
        state.ids = [*prompt, *reply.ids]
        self.turns += 1

    def _prompt(self, state: State, new: list[Message], talk: Talk) -> list[int]:
        if not state.replies:
            return self._prompts.first(new, talk.tools, talk.arguments).tolist()
        more = self._prompts.after(array("i", state.ids[-_TAIL:]), new, talk.tools, talk.arguments)
        if not 0 <= more.trim <= self._prompts.max_trim_tokens:
            raise Mismatch(f"{more.trim} stored ids are trimmed, {self._prompts.max_trim_tokens} allowed")
        if more.trim and state.ids[-1] == more.ids[0]:
            raise Mismatch("a sampled id is trimmed although the same one follows")
        prompt = [*state.ids[: len(state.ids) - more.trim], *more.ids]
        kept = len(state.ids) - self._prompts.max_trim_tokens
        if prompt[:kept] != state.ids[:kept]:
            raise Mismatch("the stored ids are no prefix of the prompt")
        return prompt

    def _compare(self, prompt: list[int], rendered: list[int], state: State) -> None:
        ours, engine = self._blocks(prompt), self._blocks(rendered)
        if len(ours) != len(engine):
            raise Mismatch(f"{len(ours)} messages, the engine has {len(engine)}")
        self.tally["prompts"] += prompt == rendered
        generated = dict(zip(state.starts, state.replies, strict=True))
        for (start, block), (_, expected) in zip(ours, engine, strict=True):
            inside = [at for at in generated if start < at < start + len(block)]
            if not inside:
                if block != expected:
                    raise Mismatch(f"a message at {start} that nothing was generated in differs")
                self.tally["others"] += 1
                continue
            (at,) = inside
            self._check_whole(block, at - start, generated[at])
            self.tally[self._why(block, expected, generated[at])] += 1

    def _check_whole(self, block: list[int], at: int, reply: Reply) -> None:
        """Generation prompt, all sampled ids, the rest of the junction; nothing else."""
        sampled = list(reply.ids)
        if sampled[-1] in self._layout.role_stops:
            sampled.pop()  # opens the next block, or is trimmed
        tail = self._layout.tail
        rest = tail[1:] if tail and reply.how == "whole" else tail
        if block[at:] != [*sampled, *rest]:
            raise Mismatch("a generation's message is not its sampled ids and the rest of the junction")

    def _why(self, block: list[int], expected: list[int], reply: Reply) -> str:
        if block == expected:
            return "equal"
        one, other = self._text(block), self._text(expected)
        if one == other:
            return "spelling"
        tail = self._text(self._layout.tail)
        one, other = one.removesuffix(tail), other.removesuffix(tail)
        if reply.how == "other_stop":
            one = one.removesuffix(self._kind.other_stop)
        drops = self._kind.reasoning and not self._pinned
        if _visible(one) != _visible(other) or (reply.how == "whole" and not drops):
            raise Mismatch(f"a {reply.how} generation's message differs in more than the rules allow")
        return "reasoning" if reply.how == "whole" else reply.how

    def _compare_session(self, state: State, talk: Talk) -> None:
        """The comparator must find only what the policy itself did."""
        found = self._prompts.mismatch(state.ids, state.messages, talk.tools, talk.arguments)
        kinds = {mismatch["type"] for mismatch in found}
        if all(reply.how == "whole" for reply in state.replies) and kinds - {"assistant_text"}:
            raise Mismatch(f"the comparator reports {sorted(kinds)} for generations that ended as they should")

    def _canonical(self, message: Message, talk: Talk) -> str | None:
        """What the template writes for this message as the last one, behind the generation prompt."""
        base: list[Message] = [{"role": "user", "content": "a"}]
        arguments = {**talk.arguments, **self._pinned}
        prompt = self._text(self._engine.ids(base, None, arguments))
        whole = self._text(self._engine.ids([*base, message], None, arguments, prompt=False))
        if not whole.startswith(prompt):
            return None
        return whole[len(prompt) :].removesuffix(self._text(self._layout.tail))

    def _parsed(self, prompt: list[int], ids: list[int]) -> Message:
        """A cut generation as an engine's reasoning parser gives it; an unfinished call stays content."""
        opened = self._text(prompt[-8:]).rstrip().endswith("<think>")
        text = ("<think>" if opened else "") + self._text(ids)
        if not self._kind.reasoning or "<think>" not in text:
            return {"role": "assistant", "content": text}
        reasoning, _, content = text.partition("<think>")[2].partition("</think>")
        return {"role": "assistant", "content": content.strip(), "reasoning_content": reasoning.strip()}

    def _blocks(self, ids: list[int]) -> list[tuple[int, list[int]]]:
        starts = [index for index, token in enumerate(ids) if token in self._layout.openings]
        bounds = [*([0] if starts[0] else []), *starts, len(ids)]
        return [(one, ids[one:two]) for one, two in itertools.pairwise(bounds)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _visible(text: str) -> str:
    return _REASONING.sub("\n", text).strip()
