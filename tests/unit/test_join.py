"""Several generations as one reply: what each engine's shapes hold, and what engines make of halves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pybase64
import pytest
from helpers.replies import parse_reply

from workers.join import Piece, Shape, join, stopped
from workers.parse import Rejected, VersionSpan

PROMPT = [1, 2, 3]
CHAT = Shape("sglang", "chat", len(PROMPT))
TOOLED = Shape("sglang", "chat", len(PROMPT), has_tools=True)


def chat(
    tokens: Sequence[str],
    content: str | None = None,
    *,
    reasoning: str | None = None,
    calls: list[Any] | None = None,
    finish: str = "abort",
    matched: int | str | None = None,
    version: str = "1",
    seen: Sequence[int] = (),
    **meta: Any,
) -> Piece:
    """A generation of SGLang's chat. Its tokens have the bytes of Latin-1, so that a test can cut a character."""
    ids = [100 + number for number in range(len(tokens))]
    raw = [token.encode("latin-1") for token in tokens]
    shown = [text.decode("utf-8", "replace") for text in raw]
    body = {
        "id": "rid",
        "object": "chat.completion",
        "created": 7,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": b"".join(raw).decode("utf-8", "replace") if content is None else content,
                    "reasoning_content": reasoning,
                    "tool_calls": calls,
                },
                "logprobs": {
                    "content": [
                        {"token": text, "bytes": list(part), "logprob": -0.5, "top_logprobs": []}
                        for text, part in zip(shown, raw, strict=True)
                    ]
                },
                "finish_reason": finish,
                "matched_stop": matched,
                "prompt_token_ids": [*PROMPT, *seen],
                "meta_info": {
                    "id": "rid",
                    "finish_reason": {"type": finish},
                    "prompt_tokens": len(PROMPT) + len(seen),
                    "completion_tokens": len(ids),
                    "cached_tokens": len(seen),
                    "weight_version": version,
                    "output_token_logprobs": [[-0.5, one, text] for one, text in zip(ids, shown, strict=True)],
                    **meta,
                },
            }
        ],
        "usage": {"prompt_tokens": len(PROMPT) + len(seen), "completion_tokens": len(ids), "total_tokens": 99},
        "metadata": {"weight_version": version},
    }
    rows = len(PROMPT) + len(seen) + len(ids) - 1
    return Piece(
        json.dumps(body).encode(),
        len(ids),
        [VersionSpan(version, 0, len(ids))] if ids else [],
        {name: (meta.get("rows_from", 0), rows) for name in ("routed_experts", "indexer_topk") if name in meta},
    )


def message(*pieces: Piece, shape: Shape = CHAT) -> dict[str, Any]:
    found: dict[str, Any] = reply(*pieces, shape=shape)["choices"][0]["message"]
    return found


def reply(*pieces: Piece, shape: Shape = CHAT) -> dict[str, Any]:
    """The joined reply, which must be a sound one."""
    stop = stopped(pieces, shape)
    body = join(pieces, shape, stop=stop)
    parse_reply(body, shape.dialect, None, shape.protocol)
    found: dict[str, Any] = json.loads(body)
    return found


def test_numbers_keep_their_spelling() -> None:
    first, second = chat(["a"]), chat(["b"], finish="stop", matched=100, seen=[100])
    first = Piece(first.body.replace(b"[[-0.5,", b"[[-5.00E-1,"), 1, first.versions, {})
    body = join([first, second], CHAT)
    assert b'"output_token_logprobs":[[-5.00E-1, 100, "a"],[-0.5, 100, "b"]]' in body


def test_a_generation_that_was_ended_in_the_queue_counts_nothing() -> None:
    """SGLang leaves its `prompt_tokens` out of `meta_info`, and says 0 in `usage`."""
    first = chat([])
    body = json.loads(first.body)
    del body["choices"][0]["meta_info"]["prompt_tokens"]
    body["usage"]["prompt_tokens"] = 0
    first = Piece(json.dumps(body).encode(), 0, [], {})
    found = reply(first, chat([]), chat(["a"]), chat(["b"], finish="stop", matched=0, seen=[100]))
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert found["choices"][0]["meta_info"]["prompt_tokens"] == 3


def test_spans_of_one_version_are_one() -> None:
    pieces = [chat(["a"], version="1"), chat([], version="1"), chat(["b"], version="1"), chat(["c"], version="2")]
    spans = reply(*pieces)["choices"][0]["meta_info"]["weight_versions"]
    assert [tuple(span.values()) for span in spans] == [("1", 0, 2), ("2", 2, 3)]


def test_a_last_part_without_tokens_does_not_lend_its_version() -> None:
    spans = reply(chat(["a"], version="1"), chat([], version="2"))["choices"][0]["meta_info"]["weight_versions"]
    assert [tuple(span.values()) for span in spans] == [("1", 0, 1)]


def test_a_parser_that_takes_the_rest_of_an_answer_for_reasoning() -> None:
    """A prompt that ends with `<think>` makes SGLang's parser see reasoning in whatever comes, until `</think>`."""
    first = chat(["Hm", "</think>", "The "], "The ", reasoning="Hm")
    second = chat(["answer", "<end>"], "", reasoning="answer", finish="stop", matched=101)
    assert message(first, second) | {"tool_calls": None} == {
        "role": "assistant",
        "content": "The answer",
        "reasoning_content": "Hm",
        "tool_calls": None,
    }


@pytest.mark.parametrize("parser_knows", [True, False])
def test_reasoning_that_ends_in_a_later_part(parser_knows: bool) -> None:
    first = chat(["<think>", "\n", "Let", " me"], "", reasoning="Let me")
    rest = [" see", "\n", "</think>", "\n\n", "Done"]
    second = chat(rest, "Done", reasoning=" see", finish="stop") if parser_knows else chat(rest, finish="stop")
    found = message(first, second)
    assert (found["reasoning_content"], found["content"]) == ("Let me see", "Done")


def test_an_engine_that_strips_nothing_is_left_its_line_ends() -> None:
    first = chat(["<think>", "\n", "Let"], "", reasoning="\nLet")
    second = chat([" me", "\n", "</think>", "\n\n", "Done"], finish="stop")
    found = message(first, second)
    assert (found["reasoning_content"], found["content"]) == ("\nLet me\n", "\n\nDone")


def test_an_engine_without_a_reasoning_parser_keeps_it_all_as_content() -> None:
    found = message(chat(["<think>", "a"]), chat(["b", "</think>", "c"], finish="stop"))
    assert (found["reasoning_content"], found["content"]) == (None, "<think>ab</think>c")


def test_tokens_that_lack_their_spaces_are_not_believed() -> None:
    """SentencePiece's tokens, shown one by one, have none: then the messages tell the text."""
    first = chat(["We", "have"], "We have")
    assert message(first, chat(["more"], " more", finish="stop"))["content"] == "We have more"
    first = chat(["<think>", "We", "have"], "", reasoning="We have")
    second = chat(["more", "</think>", "So", "it"], "So it", reasoning=" more", finish="stop")
    found = message(first, second)
    assert (found["reasoning_content"], found["content"]) == ("We have more", "So it")


def test_a_character_whose_bytes_two_generations_share() -> None:
    one, two = ("é".encode()[:1].decode("latin-1"), "é".encode()[1:].decode("latin-1"))
    assert message(chat(["caf", one], "caf"), chat([two, "s"], "\ufffds", finish="stop"))["content"] == "cafés"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def made(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "index": 0, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_call_in_two_halves_of_which_the_engine_showed_one_or_none() -> None:
    """SGLang leaves out what it sees the beginning of; whole calls keep the ids that it gave them."""
    one, two, three = (call(name, '{"x": 1.50}') for name in "abc")
    first = chat(["So", one, two[:20]], "So", calls=[made("call_1", "a", '{"x": 1.5}')])
    second = chat([two[20:], three, "<end>"], "", calls=[made("call_3", "c", '{"x": 1.5}')], finish="tool_calls")
    found = reply(first, second, shape=TOOLED)["choices"][0]
    calls = found["message"]["tool_calls"]
    assert found["message"]["content"] == "So"
    assert [one["function"]["name"] for one in calls] == ["a", "b", "c"]
    assert [one["function"]["arguments"] for one in calls] == ['{"x": 1.50}'] * 3
    assert [one["index"] for one in calls] == [0, 1, 2]
    assert (calls[0]["id"], calls[2]["id"]) == ("call_1", "call_3")
    assert calls[1]["id"].startswith("call_")
    assert len({one["id"] for one in calls}) == 3
    assert found["finish_reason"] == "tool_calls"


def test_a_call_that_is_whole_only_when_joined_ends_a_stop_as_one() -> None:
    text = call("a", "{}")
    pieces = chat([text[:15]]), chat([text[15:], "<end>"], text[15:], finish="stop", matched=101)
    assert reply(*pieces, shape=TOOLED)["choices"][0]["finish_reason"] == "tool_calls"
    assert message(*pieces, shape=CHAT)["content"] == text


def test_an_engine_that_parses_no_calls_is_left_them_as_text() -> None:
    one, two = call("a", "{}"), call("b", "{}")
    found = reply(chat([one, two[:15]]), chat([two[15:]], finish="stop", seen=[100]), shape=TOOLED)["choices"][0]
    assert (found["message"]["content"], found["message"]["tool_calls"]) == (one + two, None)
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "text", ['<tool_call>\n{"name": "a", "argu', '<tool_call>\n{"name": 1}\n</tool_call>', "<tool_call>a\n</tool_call>"]
)
def test_what_is_no_whole_call_stays_text(text: str) -> None:
    found = message(chat([text[:13]]), chat([text[13:]], finish="length"), shape=TOOLED)
    assert found["content"] == text
    assert found["tool_calls"] is None


def test_calls_in_another_form_are_those_that_the_engine_found() -> None:
    first = chat(["So", "[a(1)]"], "So", calls=[made("call_1", "a", "1")])
    second = chat(["[b(2)]"], "", calls=[made("call_2", "b", "2")], finish="tool_calls")
    found = message(first, second, shape=TOOLED)
    assert found["content"] == "So"
    assert [one["id"] for one in found["tool_calls"]] == ["call_1", "call_2"]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_across_a_seam(keeps: bool) -> None:
    shape = Shape("sglang", "chat", 3, stops=["zz", "d e", "c d e f"], keeps_stop=keeps)
    pieces = chat(["a ", "b ", "c "]), chat(["d "]), chat(["e ", "f"], finish="length")
    found = reply(*pieces, shape=shape)["choices"][0]
    assert found["message"]["content"] == ("a b c d e" if keeps else "a b c ")
    assert (found["finish_reason"], found["matched_stop"]) == ("stop", "d e")
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "d e"}
    assert found["meta_info"]["completion_tokens"] == 5
    assert len(found["logprobs"]["content"]) == 5


def test_of_stop_strings_that_one_token_completes_the_first_named_counts() -> None:
    """As both engines look for them."""
    shape = Shape("sglang", "chat", 3, stops=["d e", "c d e"])
    found = reply(chat(["c "]), chat(["d "]), chat(["e", "f"], finish="length"), shape=shape)["choices"][0]
    assert (found["message"]["content"], found["matched_stop"]) == ("c ", "d e")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("usage",), 0),
        (("sglext",), []),
        (("choices", 0, "logprobs"), True),
        (("choices", 0, "logprobs", "content"), {}),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_what_cannot_be_joined_is_refused(path: tuple[str | int, ...], value: Any, at: int) -> None:
    """A reply on its own may have any of these; one of several has to be understood."""
    pieces = [chat(["a"]), chat(["b"], finish="stop", seen=[100])]
    body = json.loads(pieces[at].body)
    home = body
    for name in path[:-1]:
        home = home[name]
    home[path[-1]] = value
    bad = json.dumps(body).encode()
    parse_reply(bad, "sglang")
    pieces[at] = Piece(bad, 1, pieces[at].versions, {})
    shape = Shape("sglang", "chat", 3, stops=["never"])
    with pytest.raises(Rejected):
        join(pieces, shape, stop=stopped(pieces, shape))


def test_a_part_without_tokens_need_not_tell_any() -> None:
    first, second = chat([]), chat(["a"], finish="stop", response_token_ids=None)
    for piece in (first, second):
        assert b'"response_token_ids"' not in piece.body.split(b'"meta_info"')[0]
    bodies = [json.loads(piece.body) for piece in (first, second)]
    bodies[0]["choices"][0]["logprobs"] = None
    bodies[1]["choices"][0]["response_token_ids"] = [100]
    found = reply(
        Piece(json.dumps(bodies[0]).encode(), 0, [], {}),
        Piece(json.dumps(bodies[1]).encode(), 1, second.versions, {}),
    )["choices"][0]
    assert found["response_token_ids"] == [100]
    assert [one["token"] for one in found["logprobs"]["content"]] == ["a"]


def completed(tokens: Sequence[str], text: str, finish: str = "abort") -> Piece:
    """A generation of SGLang's completions, which shows each token by itself."""
    ids = list(range(len(tokens)))
    logprobs = {"text_offset": [-1] * len(ids), "token_logprobs": [-0.5] * len(ids), "tokens": list(tokens)}
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish, "matched_stop": None}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
    body = {"id": "rid", "choices": [{**choice, "token_ids": ids, "prompt_token_ids": PROMPT}], "usage": usage}
    body["metadata"] = {"weight_version": "1"}
    return Piece(json.dumps(body).encode(), len(ids), [VersionSpan("1", 0, len(ids))], {})


def test_tokens_of_a_completion_that_lack_their_spaces_make_no_stop_string() -> None:
    shape = Shape("sglang", "completions", 3, stops=["ecat"])
    pieces = [completed(["the"], " the"), completed(["cat", "sat"], " cat sat", "stop")]
    found = reply(*pieces, shape=shape)
    assert (found["choices"][0]["text"], found["usage"]["completion_tokens"]) == (" the cat sat", 3)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("second", [" there", " the"], ids=["whole", "which its own stop string cut"])
def test_the_text_before_a_stop_string_is_the_engines(second: str, keeps: bool) -> None:
    """Of a character that tokens share these show none, and its last part may lack what its own stop string took."""
    shape = Shape("sglang", "completions", 3, stops=["o th", "ere"], keeps_stop=keeps)
    pieces = [completed(["\ufffd", "\ufffd", " so"], "é so"), completed([" th", "ere"], second, "stop")]
    [choice] = reply(*pieces, shape=shape)["choices"]
    assert (choice["text"], choice["matched_stop"]) == ("é so th" if keeps else "é s", "o th")
    assert len(choice["token_ids"]) == 4


@pytest.mark.parametrize("tells", [True, False], ids=["told", "untold"])
def test_sampling_masks_follow_one_another(tells: bool) -> None:
    """Over a generation that was aborted with none, and up to a stop string; one that tells none leaves none."""
    names = ("output_token_sampling_mask", "output_token_sampling_mask_length")
    first = chat(["a", "b"], **dict(zip(names, ([[7, 100], [101]], 2), strict=True)))
    aborted = chat([], seen=[100, 101], **dict.fromkeys(names))
    told = dict(zip(names, ([[100, 9], [8, 101], [102]], 3), strict=True)) if tells else {}
    last = chat(["c", "d", "e"], finish="stop", seen=[100, 101], **told)
    meta = reply(first, aborted, last)["choices"][0]["meta_info"]
    joined = [[7, 100], [101], [100, 9], [8, 101], [102]] if tells else None
    assert [meta[name] for name in names] == [joined, 5]
    cut = Shape("sglang", "chat", len(PROMPT), stops=["bc"])
    meta = reply(first, aborted, last, shape=cut)["choices"][0]["meta_info"]
    assert [meta[name] for name in names] == [joined and joined[:3], 3]


def rows_of(count: int, start: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(start * 4, (start + count) * 4, dtype="<i4").reshape(count, 2, 2)


def as_base64(rows: np.ndarray[Any, Any]) -> str:
    return pybase64.b64encode(rows.tobytes()).decode()


def test_rows_that_are_missing_are_refused() -> None:
    first = chat(["a", "b"], routed_experts=as_base64(rows_of(4)))
    with pytest.raises(Rejected, match="leaves out rows from 4 on"):
        join([first, chat(["c"], seen=[100, 101])], CHAT)
    other = chat(["c"], seen=[100, 101], routed_experts=rows_of(1, 4).tolist())
    other = Piece(other.body, 1, other.versions, {"routed_experts": (4, 5)})
    with pytest.raises(Rejected, match="different ways"):
        join([first, other], CHAT)


@pytest.mark.parametrize("spell", [as_base64, np.ndarray.tolist, lambda rows: rows.reshape(-1).tolist()])
def test_rows_of_different_sizes_are_not_joined(spell: Any) -> None:
    """Parts that two models generated, though together their ids make whole rows."""
    first = chat(["a", "b"], routed_experts=spell(rows_of(4)))
    other = chat(["c"], seen=[100, 101], routed_experts=spell(np.zeros((1, 3, 3), "<i4")))
    other = Piece(other.body, 1, other.versions, {"routed_experts": (4, 5)})
    with pytest.raises(Rejected, match="rows of different sizes"):
        join([first, other], CHAT)
