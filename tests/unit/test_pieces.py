"""Long texts and logprobs as deltas of every protocol: none too long for a reader of lines, and nothing lost."""

from __future__ import annotations

import json
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from helpers.replies import CHATS, COMPLETIONS, body_of
from helpers.streams import assembled, chunks

from app.protocols.base import CommittedReply
from app.protocols.pieces import PIECE, text_pieces
from app.protocols.registry import PROTOCOLS

LINE = 64 << 10
PROOF = "7_" + "0123456789ab" * 2
Entry = dict[str, Any]

ALPHABETS = ["a", "é", "語", "🎉", '"', "\\", "\n", "\u0001", "\u2028", "\\u0041", "x\\", '🎉\\"é\u0000a']
LONG = [letters * (50_000 // len(letters)) for letters in ALPHABETS]


def mixed(random: Random) -> str:
    return "".join(random.choices("".join(ALPHABETS), k=random.randrange(2000, 40_000)))


@pytest.mark.parametrize("text", ["", "a" * PIECE, *LONG, *(mixed(Random(seed)) for seed in range(8))])
def test_a_text_is_cut_between_code_points_into_what_one_delta_holds(text: str) -> None:
    pieces = text_pieces(text)
    sizes = [len(json.dumps(piece, ensure_ascii=False).encode()) - 2 for piece in pieces]
    assert "".join(pieces) == text
    assert max(sizes) <= PIECE
    assert min([*sizes[:-1], PIECE]) > PIECE - 6


def deltas_of(stream: bytes) -> tuple[dict[str, list[str]], list[str]]:
    """The texts of the deltas, by what they are, and the lines of all other events."""
    found: dict[str, list[str]] = defaultdict(list)
    others = []
    for line in stream.decode().split("\n"):
        data = json.loads(line[6:]) if line.startswith("data: {") else {}
        choice = data.get("choices", [{}])[0]
        texts = {"text": choice["text"]} if "text" in choice else {**choice.get("delta", {})}
        for call in texts.pop("tool_calls", ()):
            texts["arguments"] = call["function"]["arguments"]
        if isinstance(data.get("delta"), dict):
            texts = data["delta"]
        elif str(data.get("type")).endswith(".delta"):
            texts = {data["type"]: data["delta"]}
        texts = {name: text for name, text in texts.items() if isinstance(text, str) and name != "type"}
        if not texts:
            others.append(line)
        for name, text in texts.items():
            found[name].append(text)
    return found, others


NAMES = {
    "chat": ("reasoning_content", "content", "arguments"),
    "completions": ("text",),
    "messages": ("thinking", "text", "partial_json"),
    "responses": (
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
    ),
}


@pytest.mark.parametrize("protocol", NAMES)
@pytest.mark.parametrize("text", LONG)
def test_long_texts_come_in_short_deltas_and_whole(protocol: str, text: str) -> None:
    arguments = json.dumps({"text": text}, ensure_ascii=False)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}
    if protocol == "completions":
        body = body_of("vllm completion", {"choices.0.text": text, "choices.0.logprobs": None})
    else:
        body = body_of("sglang", {"choices.0.message": message})
    reply = CommittedReply(body, PROOF)
    stream = PROTOCOLS[protocol].events(reply)
    found, others = deltas_of(stream)
    whole = {name: "".join(found[name]) for name in NAMES[protocol]}
    assert list(whole.values()) == [text, text, arguments][: len(whole)] or protocol == "completions"
    assert max(len(piece.encode()) for name in whole for piece in found[name]) <= PIECE
    assert stream == PROTOCOLS[protocol].events(reply)
    if protocol == "responses":  # Its last events repeat each text.
        return
    assert max(map(len, stream.split(b"\n"))) < LINE
    assert text not in "".join(others)
    if protocol == "chat":
        made = assembled(stream.decode())["choices"][0]["message"]
        assert (made["content"], made["reasoning_content"]) == (text, text)


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_a_long_delta_of_an_engine_is_cut_as_it_comes(protocol: str) -> None:
    text = "né" * 20_000
    begun = CommittedReply(body_of("vllm", {"choices.0.message.content": ""}), PROOF)
    renderer = PROTOCOLS[protocol].live(begun)
    live = renderer.delta({"content": text})
    end = renderer.end(CommittedReply(body_of("vllm", {"choices.0.message.content": text + text}), PROOF))
    name = NAMES[protocol][1]
    if protocol == "chat":  # What was sent is not compared there.
        end = b""
    found, _ = deltas_of(live + end)
    assert "".join(found[name]) == (text if protocol == "chat" else text + text)
    assert max(len(piece.encode()) for piece in found[name]) <= PIECE


def entry(token: str, top: int = 0, raw: bytes | None = None) -> Entry:
    spelled = token.encode() if raw is None else raw
    others = [{"token": "other", "logprob": -9.5, "bytes": [1]}] * top
    return {"token": token, "logprob": -0.5, "bytes": list(spelled), "top_logprobs": others}


def words(text: str) -> list[str]:
    return [piece + " " for piece in text.split()]


REASONING, CONTENT = "why not " * 900, "it rains " * 900
EMOJI = [entry("\ufffd", raw=bytes([one])) for one in "🎉".encode()]
TOLD = [*map(entry, words(REASONING)), entry("</think>"), *map(entry, words(CONTENT)), entry("<end>")]


@pytest.mark.parametrize(
    ("message", "entries", "told"),
    [
        ({"content": "it rains "}, [*map(entry, words("it rains")), entry("<end>")], {"content"}),
        ({"content": CONTENT}, [entry(word, 20) for word in words(CONTENT)], {"content"}),
        ({"content": CONTENT, "reasoning_content": REASONING}, TOLD, {"content", "reasoning_content"}),
        ({"content": CONTENT, "reasoning": REASONING[2:]}, TOLD, {"content"}),
        ({"content": CONTENT.strip()}, TOLD, set()),
        ({"content": "🎉" * 2000}, EMOJI * 2000, {"content"}),
        ({"content": "é" * 30_000}, [entry("é" * 30_000)], set()),
        ({"content": CONTENT}, [{"odd": n} for n in range(3000)], set()),
        ({"content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}, TOLD, set()),
    ],
)
def test_logprobs_of_a_chat_come_with_their_own_text(message: Entry, entries: list[Entry], told: set[str]) -> None:
    logprobs = {"content": entries, "refusal": None}
    body = body_of("vllm", {"choices.0.message": {"role": "assistant", **message}, "choices.0.logprobs": logprobs})
    stream = PROTOCOLS["chat"].events(CommittedReply(body, PROOF)).decode()
    got: list[Entry] = []
    seen = set()
    for choice in (chunk["choices"][0] for chunk in chunks(stream)):
        own = (choice.get("logprobs") or {}).get("content") or []
        size = sum(len(json.dumps(one, separators=(",", ":"))) for one in own)
        assert size <= PIECE or len(own) in (1, 4)
        for name in {"content", "reasoning_content", "reasoning"} & choice["delta"].keys():
            text = choice["delta"][name] or ""
            assert len(text.encode()) <= PIECE
            if own and len(own) == len(entries) == 1:
                continue  # One token's text is longer than a delta.
            if own and text:
                assert b"".join(bytes(one["bytes"]) for one in own).decode() == text
                seen.add(name)
        got += own
    assert got == entries
    assert seen == told
    assert max(map(len, stream.split("\n"))) < LINE or len(entries) == 1
    if "odd" not in entries[0]:
        [whole] = assembled(stream)["choices"]
        assert [one["logprob"] for one in whole["logprobs"]["content"]] == [one["logprob"] for one in entries]
        assert whole["message"]["content"] == message["content"]


@pytest.mark.parametrize(("text", "is_told"), [(CONTENT, True), (CONTENT.strip(), False)])
def test_logprobs_of_a_completion_come_with_their_own_text(text: str, is_told: bool) -> None:
    tokens = words(CONTENT)
    numbers = [-n / 8 for n in range(len(tokens))]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": numbers,
        "top_logprobs": [],
        "text_offset": list(range(len(tokens))),
    }
    body = body_of("vllm completion", {"choices.0.text": text, "choices.0.logprobs": logprobs})
    stream = PROTOCOLS["completions"].events(CommittedReply(body, PROOF))
    choices = [chunk["choices"][0] for chunk in chunks(stream.decode())]
    got = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert {name: [one for own in got for one in own[name]] for name in logprobs} == logprobs
    assert "".join(choice["text"] for choice in choices) == text
    assert is_told == all("".join(c["logprobs"]["tokens"]) == c["text"] for c in choices if c["logprobs"])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert max(map(len, stream.split(b"\n"))) < LINE // 2


def test_logprobs_of_a_response_come_with_their_own_text() -> None:
    body = body_of("vllm", {"choices.0.message.content": CONTENT, "choices.0.logprobs": {"content": TOLD}})
    echo = json.dumps({"protocol": "responses", "shown": {}, "logprobs": True}).encode()
    stream = PROTOCOLS["responses"].events(CommittedReply(body, PROOF, echo)).decode()
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert len(deltas) > 5
    assert all("".join(entry["token"] for entry in one["logprobs"]) == one["delta"] for one in deltas)
    [done] = [one for one in events if one["type"] == "response.output_text.done"]
    assert [entry for one in deltas for entry in one["logprobs"]] == done["logprobs"]
    assert "".join(one["delta"] for one in deltas) == done["text"] == CONTENT


def test_a_short_reply_comes_in_one_chunk() -> None:
    for shape in (*CHATS, *COMPLETIONS):
        changes = {"choices.0.logprobs": None}
        protocol = "chat" if shape in CHATS else "completions"
        sent = chunks(PROTOCOLS[protocol].events(CommittedReply(body_of(shape, changes), PROOF)).decode())
        assert len(sent) == (2 if shape in CHATS else 1)
