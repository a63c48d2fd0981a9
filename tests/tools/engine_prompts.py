"""`python -m tests.tools.engine_prompts ENGINE FOLDER`: random chats, rendered by a running engine and by Turnlog.

The engine (`http://127.0.0.1:30000`; SGLang, or vLLM with `--dialect vllm`) serves the model of FOLDER, whose tokenizer
Turnlog loads. Each chat is sent to the engine as it is, and the ids that it reports of the prompt are compared with the
first prompt that Turnlog makes of the same body. 1 if one differs, or if Turnlog makes one that the engine refuses and
would still refuse with ids.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from typing import Any

import httpx
import msgspec

from app.errors import AppError
from app.protocols.chat import parse_chat
from app.tito.normalise import EngineDialect
from app.tito.prompts import Prompts
from app.turn.token_in import TokenIn

Chat = dict[str, Any]

_WORDS = (
    "the file says that 42 is not 1,000.5 — naïve 北京 🙂 let's see; x_1 = f(y)\n\nyear 12345 100% "
    "<b> & 'q' \"d\" \\ ok?"
)
_ARGUMENTS = (
    *("{}", '{"a": 1}', '{"city":"Zürich  12345","n":3}', ' {"a":\n[1, {"b": null}]}', '{"a": 1.0, "b": -0, "c": 1E2}'),
    *('{"a": 18446744073709551616}', '{"a": -9223372036854775809}', '{"a": 1, "a": 2}', '{"é": "\\u00e9"}'),
)
_ODD_ARGUMENTS = (
    *("", "x", "null", "[1]", '"a"', "7", '{"a": 1e400}', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1,}', '{"a": 01}'),
    *('{"a": %s}' % ("9" * 400), '{"a": "x\ny"}', "\ufeff{}", '{"a": 1} x', None, {"a": 1, "b": [2.5]}, {"a": 1 << 70}),
)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max", 0.25, 0, "0.5", None)


class Chats:
    """Random chats. `odd`: how often there is something that a client seldom sends, from 0 to 1."""

    def __init__(self, seed: str, odd: float) -> None:
        self._rng = random.Random(seed)
        self._odd = odd

    def chat(self) -> Chat:
        rng = self._rng
        body: Chat = {"model": "m", "messages": self._messages()}
        if rng.random() < 0.6:
            body["tools"] = [self._tool(number) for number in range(rng.randint(1, 3))]
            named = {"type": "function", "function": {"name": "tool_0"}}
            if rng.random() < 0.4:
                body["tool_choice"] = rng.choice(["auto", "none", "required", named])
        if rng.random() < 0.5:
            body["reasoning_effort"] = rng.choice(_EFFORTS)
        if rng.random() < 0.2:
            body["reasoning"] = rng.choice(
                [{"effort": rng.choice(_EFFORTS[:9])}, {"enabled": rng.choice([True, False, "yes", "no"])}, {}, None]
            )
        if rng.random() < 0.3:
            names = rng.sample(["thinking", "enable_thinking", "reasoning_effort"], rng.randint(1, 2))
            body["chat_template_kwargs"] = {
                name: rng.choice(["low", "high"] if name == "reasoning_effort" else [True, False]) for name in names
            }
        if rng.random() < 0.1:
            body["response_format"] = {"type": "json_object"}
        return body

    def _messages(self) -> list[Chat]:
        rng, messages = self._rng, list[Chat]()
        if rng.random() < 0.5:
            messages.append(self._with_tools({"role": rng.choice(["system", "developer"]), "content": self._content()}))
        messages.append({"role": "user", "content": self._content()})
        for _ in range(rng.randint(0, 4)):
            answer = self._answer()
            messages.append(answer)
            for call in answer.get("tool_calls") or ():
                result: Chat = {"role": "tool", "tool_call_id": call.get("id"), "content": self._content()}
                messages.append({**result, "name": "tool_0"} if rng.random() < 0.2 else result)
            if rng.random() < 0.1:
                messages.append({"role": rng.choice(["system", "developer"]), "content": self._content()})
            if not answer.get("tool_calls") or rng.random() < 0.5:
                messages.append({"role": "user", "content": self._content()})
        if rng.random() < 0.15:
            messages.append(self._answer())
        return messages

    def _answer(self) -> Chat:
        rng = self._rng
        answer: Chat = {"role": "assistant", "content": self._content()}
        for name in ("reasoning_content", "reasoning", "thinking"):
            if rng.random() < (0.3 if name == "reasoning_content" else 0.15):
                answer[name] = rng.choice([self._text(), "", None])
        if rng.random() < 0.4:
            answer["tool_calls"] = [self._call(number) for number in range(rng.randint(0, 3))]
            answer["content"] = rng.choice([None, "", answer["content"]])
        if self._is_odd():
            answer |= {"name": "helper", "phase": "commentary", "unknown": 1}
        return answer

    def _call(self, number: int) -> Chat:
        arguments = self._rng.choice(_ODD_ARGUMENTS if self._is_odd() else _ARGUMENTS)
        call: Chat = {
            "function": {"name": "tool_0", "arguments": arguments},
            "type": "function",
            "id": f"call{number:05}",
        }
        if self._is_odd():
            del call[self._rng.choice(["type", "id"])]
            call["index"] = number
        return call

    def _tool(self, number: int) -> Chat:
        rng = self._rng
        schema = {"type": "object", "properties": {"q": {"type": "string", "maxLength": rng.choice([9, 1 << 65])}}}
        function: Chat = {"name": f"tool_{number}", "description": self._text(), "parameters": schema}
        function = dict(rng.sample(list(function.items()), 3))
        tool: Chat = {"type": "function", "function": function}
        if self._is_odd():
            name = rng.choice(["description", "parameters", "strict", "defer_loading", "unknown"])
            if name in ("description", "parameters"):
                function[name] = None
            else:
                function[name] = rng.choice([True, False, None])
        if self._is_odd():
            tool["defer_loading"] = rng.choice([True, False])
        return tool

    def _with_tools(self, message: Chat) -> Chat:
        return {**message, "tools": [self._tool(9)]} if self._is_odd() else message

    def _content(self) -> Any:
        if self._rng.random() < 0.8:
            return self._text()
        return [{"type": "text", "text": self._text()} for _ in range(self._rng.randint(0 if self._is_odd() else 1, 3))]

    def _text(self) -> str:
        return " ".join(self._rng.choices(_WORDS.split(" "), k=self._rng.randint(1, 12)))

    def _is_odd(self) -> bool:
        return self._rng.random() < self._odd


class Comparison:
    """What an engine and Turnlog make of chats. `counts` by outcome; `wrong` are the chats that differ."""

    def __init__(self, engine: httpx.Client, folder: str, dialect: EngineDialect) -> None:
        self._engine = engine
        self._prompts = Prompts.load(folder, dialect=dialect)
        self._token_in = TokenIn(None, self._prompts, lambda: dialect)  # type: ignore[arg-type]  # no session
        self._pinned = self._prompts.pinned
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, Chat]] = []

    def chat(self, body: Chat) -> None:
        if self._pinned:  # a session always has them, so the engine is asked for them as well
            body = {**body, "chat_template_kwargs": {**(body.get("chat_template_kwargs") or {}), **self._pinned}}
        theirs = self._asked(body)
        try:
            ours: list[int] | str | None = self._made(body)
        except AppError as error:
            ours = f"Turnlog refuses: {error}"
        if ours is None:
            self.counts["captured"] += 1
        elif isinstance(theirs, str) and isinstance(ours, str):
            self.counts["both refuse"] += 1
        elif isinstance(ours, str):
            self.counts[ours] += 1
        elif ours == theirs:
            self.counts["the same ids"] += 1
        elif isinstance(theirs, str) and isinstance(self._asked({**body, "input_ids": ours}), str):
            self.counts["the engine refuses, with ids too"] += 1
        else:
            what = f"the engine refuses: {theirs}" if isinstance(theirs, str) else "other ids"
            self.counts[what] += 1
            self.wrong.append((what, body))

    def _asked(self, body: Chat) -> list[int] | str:
        """The ids of the engine's prompt, or why it refuses."""
        asked = {**body, "max_tokens": 1, "return_prompt_token_ids": True, "return_token_ids": True}
        reply = self._engine.post(
            "/v1/chat/completions", content=json.dumps(asked), headers={"content-type": "application/json"}
        )
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text[:160]}"
        read = reply.json()
        ids: list[int] = read.get("prompt_token_ids") or read["choices"][0]["prompt_token_ids"]
        return ids

    def _made(self, body: Chat) -> list[int] | None:
        request = parse_chat(json.dumps(body).encode())
        template = self._token_in.template_of(request)
        if template is None:
            return None
        messages = [msgspec.json.decode(raw) for raw in request.messages]
        return self._prompts.first(messages, template.offered, template.arguments, template.dialect).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.tools.engine_prompts", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("folder")
    parser.add_argument("--dialect", default="sglang", choices=["sglang", "vllm"])
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--odd", type=float, default=0.08)
    parser.add_argument("--show", type=int, default=1, help="chats that differ")
    options = parser.parse_args()
    with httpx.Client(base_url=options.engine, timeout=60) as engine:
        compared = Comparison(engine, options.folder, options.dialect)
        for number in range(options.chats):
            compared.chat(Chats(f"{options.seed}/{number}", options.odd).chat())
    for outcome, count in compared.counts.most_common():
        print(f"{count:>6}  {outcome}")
    for what, body in compared.wrong[: options.show]:
        print(f"\n{what}\n{json.dumps(body)}")
    return 1 if compared.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
