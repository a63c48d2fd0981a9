"""One template: every prompt of random conversations beside the template's own rendering of all their messages.

A first prompt must be that rendering, id by id. A later one must be what was generated and then, from the end of the
last assistant message on, that rendering: before it a template may show less than what was generated (reasoning).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from app.errors import InvalidRequest
from app.tito.continuation import NotAnExtension
from app.tito.prompts import Prompts
from tests.tools.tito_check.conversations import Message, Talk, What
from tests.tools.tito_check.engine import Engine


class Check:
    """Conversations with one tokenizer. `turns` are those that continue stored ids; `refused` says why some do not.

    `wrong` names the conversations in which a prompt is not what it must be.
    """

    def __init__(self, prompts: Prompts, tokenizer: Any, stops: frozenset[int]) -> None:
        """`stops`: the ids that end a generation as far as the tokenizer's folder says."""
        self._prompts = prompts
        self._engine = Engine(tokenizer, prompts.findings.message_format)
        self._special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._stops = stops
        self.begin()

    def begin(self) -> None:
        """Count from 0."""
        self.turns = 0
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []

    def conversation(self, seed: str, what: What) -> None:
        talk = Talk(random.Random(f"{what}/{seed}"), what, tools=self._prompts.findings.tools)
        began = arguments = talk.arguments({})
        messages = talk.opening()
        if not self._first(messages, talk, arguments, seed):
            return
        for _ in range(random.Random(seed).randint(1, 5)):
            reply = self._reply(messages, talk, arguments)
            if reply is None:
                return
            answer, generated, word = reply
            new = talk.following(answer)
            arguments = talk.arguments(arguments)
            history, messages = messages, [*messages, answer, *new]
            whole = self._engine.text(messages, talk.tools, arguments)
            if whole is None or word not in whole:
                return  # the template refuses these messages, as an engine would
            self.turns += 1
            try:
                if self._prompts.rewrites_history(began, arguments, talk.tools):
                    raise NotAnExtension("chat_template_kwargs would render the stored messages otherwise")
                more = self._prompts.after(generated[-1], history, answer, new, talk.tools, arguments)
            except (NotAnExtension, InvalidRequest) as error:
                self.refused[str(error)] += 1
                if not self._first(messages, talk, arguments, seed):
                    return
                began = arguments
                continue
            expected = self._engine.ids(word + whole.rpartition(word)[2])
            prompt = [*generated[: len(generated) - more.trim], *more.ids]
            if more.trim > self._prompts.max_trim_tokens or prompt != expected:
                self.wrong.append(seed)
        self._first(messages, talk, arguments, seed)  # as where a client brings a history along

    def _first(self, messages: list[Message], talk: Talk, arguments: dict[str, Any], seed: str) -> bool:
        """Compares a whole prompt; False if the template refuses the messages."""
        whole = self._engine.text(messages, talk.tools, arguments)
        if whole is None:
            return False
        try:
            prompt = self._prompts.first(messages, talk.tools, arguments).tolist()
        except InvalidRequest:
            prompt = None
        if prompt != self._engine.ids(whole):
            self.wrong.append(seed)
        return prompt is not None

    def _reply(
        self, messages: list[Message], talk: Talk, arguments: dict[str, Any]
    ) -> tuple[Message, list[int], str] | None:
        """A message, the ids that were generated from its last rendered word on, and that word.

        None if the template does not render it.
        """
        answer, words = talk.answer()
        if talk.cuts and answer["content"]:
            answer = {"role": "assistant", "content": answer["content"]}
            return answer, self._engine.ids(words[0]), words[0]
        alone = self._engine.text([*messages, answer], talk.tools, arguments, prompt=False)
        if alone is None:
            return None
        word = next((word for word in reversed(words) if word in alone), None)
        if word is None:
            return None
        ids = self._engine.ids(word + alone.rpartition(word)[2])
        ends = [index for index, token in enumerate(ids) if token in self._special]
        stops = [index for index in ends if ids[index] in self._stops]
        if ends:
            return answer, ids[: (stops or ends[-1:])[0] + 1], word
        # GLM: a generation ends with the token that begins the next message.
        calls = answer.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "content"} for call in calls]
        whole = [*messages, answer, *(results or [{"role": "user", "content": "content"}])]
        text = self._engine.text(whole, talk.tools, arguments) or ""
        ids = self._engine.ids(word + text.rpartition(word)[2].partition("content")[0])
        begins = next((index for index, token in enumerate(ids) if token in self._special), None)
        return None if begins is None else (answer, ids[: begins + 1], word)
