"""The chat template: ChatML with tools, tool results and kept reasoning.

It renders like Qwen3's with one difference: reasoning that a client sends back stays in the prompt in every turn. So a
history that is sent back unchanged is a token prefix of the next prompt.

Each message is rendered and encoded separately. The ids equal those of the whole prompt, because at every border is a
special token or a letter next to a newline. The exception is an assistant text that begins with white space: the border
after ``assistant\n`` is kept on purpose, since a sampled token never merges with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ops.simulator.tokenizer import IM_END, IM_START, IMAGE_PAD, VISION_END, VISION_START, Encoded, Lru, Tokenizer
from ops.simulator.wire import BadRequest, SentMessage, SentToolCall, Tool

GENERATION_PROMPT = f"{IM_START}assistant\n"
_RENDERED = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_TURN_END = f"{IM_END}\n"
_TOOL_TURN_START = f"{IM_START}user"
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TOOLS_INTRO = "\n\n# Tools\n\nThese functions can be called; their signatures are in JSON:\n<tools>"
TOOLS_OUTRO = (
    "\n</tools>\n\nA call is one JSON object inside tool_call tags:\n"
    '<tool_call>\n{"name": <function>, "arguments": <object>}\n</tool_call>'
)


_IMAGE_SIDE = 28
"""Pixels, of the square that a placeholder stands for."""

_MOST_PLACEHOLDERS = 1280
_HEADER_BYTES = 24
"""A PNG begins with its signature, a chunk's length and name, and its width and height."""


@dataclass(slots=True)
class Rendered:
    """A message: its role, its text in separately encoded pieces, a digest, and whether the arguments of each of its
    calls are a JSON object. Its ids are there after its first prompt: a prompt of ids needs none."""

    role: str
    pieces: tuple[str, ...]
    digest: bytes
    calls_objects: bool = True
    encoded: Encoded | None = None


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request, and their text in the system message."""

    tools: tuple[Tool, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as the policy uses it: the digests, and the progress of the current task.

    ``digest`` covers all messages, and ``task_digest`` those up to the last user message. ``tool_results`` is the
    number of tool messages after it.
    """

    messages: tuple[Rendered, ...]
    toolbox: Toolbox
    digest: bytes
    task_digest: bytes
    tool_results: int


def digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def bare_conversation(prompt: Encoded) -> Conversation:
    """The prompt as a conversation for the policy: without messages and tools, with the digest of its ids."""
    digest = digest_of(prompt.packed)
    return Conversation((), Toolbox((), ""), digest, digest, 0)


def call_text(name: str, arguments: str) -> str:
    """A tool call as the model writes it, with ``arguments`` unchanged."""
    quoted = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>'


def assistant_text(content: str, reasoning: str | None, calls: list[tuple[str, str]]) -> str:
    """The text of an assistant turn, without its end token."""
    text = f"<think>\n{reasoning}\n</think>\n\n{content}" if reasoning else content
    for index, (name, arguments) in enumerate(calls):
        text += "\n" + call_text(name, arguments) if content or index else call_text(name, arguments)
    return text


def _is_image(part: dict[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def _placeholders(part: dict[str, Any]) -> str:
    """As many as Qwen2-VL's processor makes of an inline PNG of at least 56 x 56 pixels; one for any other image."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    return VISION_START + IMAGE_PAD * _image_count(url if isinstance(url, str) else "") + VISION_END


def _image_count(url: str) -> int:
    head, _, text = url.partition(",")
    if not head.endswith(";base64") or len(text) < 4 * _HEADER_BYTES // 3:
        return 1
    try:
        data = base64.b64decode(text[: 4 * _HEADER_BYTES // 3])
    except ValueError:
        return 1
    if data[12:16] != b"IHDR":
        return 1
    width, height = (int.from_bytes(data[start : start + 4]) for start in (16, 20))
    return max(1, min(round(width / _IMAGE_SIDE) * round(height / _IMAGE_SIDE), _MOST_PLACEHOLDERS))


def _plain(content: str | list[dict[str, Any]] | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_placeholders(part) if _is_image(part) else str(part.get("text", "")) for part in content)


def _calls_object(call: SentToolCall) -> bool:
    arguments = call.function.arguments
    try:
        return isinstance(arguments, dict) or isinstance(msgspec.json.decode(arguments), dict)
    except msgspec.DecodeError:
        return False


def _sent_call(call: SentToolCall, mended: bool) -> tuple[str, str]:
    arguments = call.function.arguments if _calls_object(call) or not mended else "{}"
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call.function.name, arguments


def _pieces(message: SentMessage, mended: bool) -> tuple[str, ...]:
    content = _plain(message.content)
    if message.role == "assistant":
        calls = [_sent_call(call, mended) for call in message.tool_calls or ()]
        text = assistant_text(content, message.reasoning_content, calls)
        return (GENERATION_PROMPT, text, _TURN_END) if text else (GENERATION_PROMPT, _TURN_END)
    if message.role == "tool":
        return (f"\n<tool_response>\n{content}\n</tool_response>",)
    role = "system" if message.role == "developer" else message.role
    return (f"{IM_START}{role}\n{content}{_TURN_END}",)


class Template:
    """Renders conversations to prompts, and caches every rendered message.

    With ``mends_arguments``, as in vLLM, a call whose arguments are no JSON object is rendered with ``{}``.
    """

    def __init__(self, tokenizer: Tokenizer, mends_arguments: bool = False) -> None:
        self.tokenizer = tokenizer
        self._mends_arguments = mends_arguments
        self._rendered: Lru[bytes, Rendered] = Lru(64 * 2**20)
        self._toolboxes: Lru[bytes, Toolbox] = Lru(8 * 2**20)
        self._decode = msgspec.json.Decoder(SentMessage).decode
        self._decode_tools = msgspec.json.Decoder(list[Tool] | None).decode

    def read(self, messages: list[msgspec.Raw], tools: msgspec.Raw) -> Conversation:
        """Parse the history. Raises :class:`BadRequest` or msgspec's errors."""
        if not messages:
            raise BadRequest("Messages cannot be empty.")
        rendered = tuple([self._message(bytes(raw)) for raw in messages])
        whole = hashlib.blake2b(digest_size=16)
        task = b""
        results = 0
        for message in rendered:
            whole.update(message.digest)
            if message.role == "user":
                task, results = whole.digest(), 0
            elif message.role == "tool":
                results += 1
        return Conversation(rendered, self._toolbox(bytes(tools)), whole.digest(), task, results)

    def reread(self, prompt: str) -> Conversation:
        """The conversation that was rendered to this prompt; what follows the last generation prompt is left out.

        Results of tools are read as a user's messages.
        """
        tools, messages = msgspec.Raw(b""), []
        for role, content in _RENDERED.findall(prompt.rpartition(GENERATION_PROMPT)[0]):
            text, offered, rest = content.partition(TOOLS_INTRO)
            if role == "system" and offered:
                lines = rest.removesuffix(TOOLS_OUTRO).strip().split("\n")
                tools = msgspec.Raw(f"[{','.join(lines)}]".encode())
                if not text:
                    continue
            messages.append(msgspec.Raw(msgspec.json.encode({"role": role, "content": text})))
        return self.read(messages, tools)

    def prompt(self, conversation: Conversation) -> Encoded:
        """The ids of the prompt, including the generation prompt."""
        parts: list[Encoded] = []
        for part in self._layout(conversation):
            if isinstance(part, str):
                parts.append(self.tokenizer.encode(part))
                continue
            if part.encoded is None:
                part.encoded = Encoded.joined([self.tokenizer.encode(piece) for piece in part.pieces])
            parts.append(part.encoded)
        return Encoded.joined(parts)

    def pieces(self, conversation: Conversation) -> list[str]:
        """The prompt's text, in separately encoded pieces."""
        layout = self._layout(conversation)
        return [piece for part in layout for piece in ((part,) if isinstance(part, str) else part.pieces)]

    def _layout(self, conversation: Conversation) -> list[str | Rendered]:
        """The messages, and what stands between them."""
        messages = conversation.messages
        pieces: list[str | Rendered] = []
        if conversation.toolbox.text:
            first = messages[0]
            own = first.pieces[0].removesuffix(_TURN_END) if first.role == "system" else f"{IM_START}system\n"
            pieces.append(own + conversation.toolbox.text + _TURN_END)
            messages = messages[1:] if first.role == "system" else messages
        in_tools = False
        for message in messages:
            if (message.role == "tool") != in_tools:
                pieces.append(_TURN_END if in_tools else _TOOL_TURN_START)
                in_tools = not in_tools
            pieces.append(message)
        if in_tools:
            pieces.append(_TURN_END)
        pieces.append(GENERATION_PROMPT)
        return pieces

    def _message(self, raw: bytes) -> Rendered:
        found = self._rendered.get(raw)
        if found is not None:
            return found
        message = self._decode(raw)
        if message.role not in _ROLES:
            raise BadRequest(f"unknown role {message.role[:40]!r}")
        pieces = _pieces(message, self._mends_arguments)
        digest = hashlib.blake2b(digest_size=16)
        for piece in (message.role, *pieces):
            digest.update(piece.encode("utf-8", "surrogatepass") + b"\0")
        role = "system" if message.role == "developer" else message.role
        rendered = Rendered(role, pieces, digest.digest(), all(map(_calls_object, message.tool_calls or ())))
        return self._rendered.put(raw, rendered, 200 + 5 * len(raw))

    def _toolbox(self, raw: bytes) -> Toolbox:
        found = self._toolboxes.get(raw)
        if found is not None:
            return found
        tools = self._decode_tools(raw) if raw else None
        text = ""
        if tools:
            lines = [json.dumps(tool, ensure_ascii=False) for tool in msgspec.json.decode(raw)]
            text = TOOLS_INTRO + "".join("\n" + line for line in lines) + TOOLS_OUTRO
        return self._toolboxes.put(raw, Toolbox(tuple(tools or ()), text), 400 + 4 * len(raw))
