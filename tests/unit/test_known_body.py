"""A body that begins with a known one is read as if nothing were known of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.making import Book, assistant, raws, user

from app.domain import known_body
from app.domain.history import RequestHistory
from app.domain.known_body import LONG_BODY, ContinuedBody, KnownBodies, KnownBody
from app.domain.request import ChatRequest
from app.errors import AppError
from app.protocols.chat import parse_chat
from workers.parse_prompt import Hasher

LONG = "lorem, [ipsum] {dolor} \\u0041é " * (LONG_BODY // 24)
MESSAGES = [{"role": "system", "content": LONG}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def body_of(messages: Any = MESSAGES, front: str = '{"model":"m",', rest: str = "}", comma: str = ",") -> bytes:
    texts = [json.dumps(one, ensure_ascii=False) if isinstance(one, dict) else one for one in messages]
    return f'{front}"messages":[{comma.join(texts)}]{rest}'.encode()


def known_after(*bodies: bytes) -> KnownBodies:
    """As after turns with these bodies."""
    found = KnownBodies()
    for turn, body in enumerate(bodies, 1):
        continued = continued_of(found, body)
        layout = parse_chat(body, False, continued).layout
        assert layout is not None
        keep(found, layout, turn, hashlib.sha256())
    return found


def keep(known: KnownBodies, layout: KnownBody, turn: int, prefix_hasher: Hasher) -> None:
    """As a commit does."""
    continued = layout.continued
    layout.keep("chat", turn, prefix_hasher)
    known.add(layout, continued, 0)


def continued_of(known: KnownBodies, body: bytes) -> ContinuedBody | None:
    return known.continued(body, "chat")


def told(body: bytes, continued: ContinuedBody | None) -> dict[str, Any] | tuple[str, str]:
    """All of the parsed request, in the order of its parameters, or its error."""
    try:
        request = parse_chat(body, False, continued)
    except AppError as error:
        return error.code, str(error)
    layout = request.layout
    return {
        "messages": [bytes(raw) for raw in request.messages],
        "last": bytes(request.messages[-1]),
        "slice": [bytes(raw) for raw in request.messages[1:]],
        "params": [(name, bytes(raw)) for name, raw in request.params.items()],
        "tools": None if request.tools is None else bytes(request.tools),
        "stream": (request.stream, request.stream_mode),
        "ids": request.ids,
        "places": None if layout is None else layout.places,
        "front": None if layout is None else [(name, bytes(raw)) for name, raw in layout.front.items()],
        "fields": None if layout is None else [(name, bytes(raw)) for name, raw in layout.fields.items()],
        "tail": None if layout is None else bytes(layout.tail),
    }


MORE = [*MESSAGES, {"role": "assistant", "content": "é"}, {"role": "user", "content": "c"}]
CONTINUED = {
    "the same": body_of(),
    "more": body_of(MORE),
    "fewer": body_of(MESSAGES[:2]),
    "another last one": body_of([*MESSAGES[:2], {"role": "user", "content": "c"}]),
    "a moved mark": body_of([*MESSAGES[:2], {"role": "user", "content": "b", "cache_control": {}}, MORE[-1]]),
    "white space": body_of(MORE, comma=" ,\n\t"),
    "other fields": body_of(MORE, rest=f',"temperature":0.5,"stream":true,"tools":{json.dumps(TOOLS)}}}'),
    "a field again": body_of(MORE, rest=',"model":"other","z":1,"z":2}'),
    "ids": body_of(MORE, rest=',"input_ids":[1,2]}'),
    "a tail that ends like the known one": body_of(MORE, rest=',"z":[{"a":[5]}]}'),
    "no tools": body_of(MORE, rest=',"tools":null}'),
    "white space behind": body_of(MORE, rest=" \n}\n "),
    "white space before the end": body_of(MORE).replace(b'"}]}', b'"} ] }'),
    "no object": body_of([*MESSAGES, "5"]),
    "NaN": body_of([*MESSAGES, '{"role":"user","content":1e999}']),
    "another front": body_of(MORE, front='{"model":"n",'),
    "a longer front": body_of(MORE, front='{"model":"m","seed":7,"stop":["messages\\":["],'),
    "a shorter front": body_of(MORE, front=" { "),
    "another front, white space": body_of(MORE, front='{"model":"n",').replace(b'"messages":[', b'"messages" : [ \n'),
    "another front, fewer": body_of(MESSAGES[:2], front='{"model":"n",'),
    "the list twice, another front": body_of(MORE, front='{"messages":[5],"model":"n",'),
    "control": body_of(MORE, rest=',"nvext":{"session_control":{"action":"open"}}}'),
}
NOT_CONTINUED = {
    "an invalid front": body_of(MORE, front='{"model":n,'),
    "a front that is not UTF-8": body_of(MORE, front='{"model":"?",').replace(b"?", b"\xff", 1),
    "a longer front that is not valid": body_of(MORE, front='{"model":"n" "seed":7,'),
    "a list of another name": body_of(MORE, front='{"model":"n",').replace(b'"messages":[', b'"message":['),
    "a list in a list": body_of(MORE, front='{"model":"n",').replace(b'"messages":[', b'"messages":[['),
    "a list in an object": body_of(MORE, front='{"model":{').replace(b"}]}", b"}]}}"),
    "another first message": body_of([{"role": "system", "content": LONG + "x"}, *MESSAGES[1:]]),
    "a longer first message": body_of([{"role": "system", "content": LONG, "name": "x"}, *MESSAGES[1:]]),
    "a longer list again": body_of(
        MORE, rest=f',"messages":[{{"role":"user","content":"{"z" * 200}"}}],"stream":false}}'
    ),
    "the list again": body_of(MORE, rest=',"messages":[{"role":"user","content":"z"}]}'),
    "the list again, escaped": body_of(MORE, rest=',"\\u006dessages":[{"role":"user","content":"z"}]}'),
    "another value for the list": body_of(MORE, rest=',"messages":5}'),
    "a comma at the end": body_of([*MESSAGES, ""]),
    "two commas": body_of([*MESSAGES, "", MORE[-1]]),
    "no comma": body_of(MESSAGES)[:-2] + b'{"role":"user"}]}',
    "no end of the list": body_of(MORE)[:-2],
    "no end": body_of(MORE)[:-1],
    "more behind the end": body_of(MORE) + b"}",
    "a text behind the end": body_of(MORE) + b"x",
    "cut in the head": body_of()[: LONG_BODY + 10],
    "cut at the last message": body_of()[:-2],
    "not UTF-8": body_of(MORE).replace('é"}'.encode(), b'\xff"}'),
    "many fields": body_of(MORE, rest="," + ",".join(f'"f{place}":1' for place in range(1001)) + "}"),
}


@pytest.mark.parametrize("name", [*CONTINUED, *NOT_CONTINUED])
def test_a_continued_body_is_read_as_a_new_one(name: str) -> None:
    body = {**CONTINUED, **NOT_CONTINUED}[name]
    known = known_after(body_of(), body_of(MORE[:4])) if name == "more" else known_after(body_of())
    continued = continued_of(known, body)
    assert (continued is not None) == (name in CONTINUED)
    assert told(body, continued) == told(body, None)


def test_a_nested_new_message_is_read_as_in_a_new_body() -> None:
    """Python 3.14 reads deeper than earlier ones."""
    body = body_of([*MESSAGES, "[" * 5000 + "]" * 5000])
    assert told(body, continued_of(known_after(body_of()), body)) == told(body, None)


def test_values_are_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked in earlier requests counts towards the limit of all messages."""
    known, body = known_after(body_of()), body_of(MORE)
    continued = continued_of(known, body)
    whole = parse_chat(body).layout
    assert continued is not None
    assert whole is not None
    assert continued.layout.values == whole.values
    monkeypatch.setattr(known_body, "MOST_VALUES", whole.values - 1)
    assert known.continued(body, "chat") is None
    monkeypatch.setattr(known_body, "MOST_VALUES", whole.values)
    assert known.continued(body, "chat") is not None


TAIL = '],"y":"]}","z":[{"messages":[]}]}'
PIECES = st.sampled_from(
    [
        '{"role":"user","content":"x"}',
        ",",
        "]",
        "[",
        "}",
        "{",
        '"',
        "\\",
        " ",
        "1",
        '"messages":[',
        ',"z":1',
        "é",
        "null",
        TAIL,
        TAIL[1:],
        '],"z":[{}',
    ]
)


@given(st.lists(PIECES, max_size=8), st.integers(0, 3), st.sampled_from(["}", TAIL[1:]]))
def test_whatever_follows(pieces: list[str], count: int, rest: str) -> None:
    first = body_of(rest=rest)
    head = body_of(MESSAGES[:count])[:-2] if count else body_of()[:-2]
    body = head + "".join(pieces).encode()
    assert told(body, continued_of(known_after(first), body)) == told(body, None)


FRONT_PIECES = [
    '"a":1,',
    '"messages":[2],',
    '"x":"\\"messages\\":[",',
    '"o":{"messages":[3]},',
    "[",
    "{",
    "}",
    ",",
    "é",
    " ",
    '"',
]


@given(st.lists(st.sampled_from(FRONT_PIECES), max_size=6), st.sampled_from([MORE, MESSAGES[:2], MORE[1:]]))
def test_whatever_stands_before(pieces: list[str], messages: list[dict[str, Any]]) -> None:
    body = body_of(messages, "{" + "".join(pieces))
    assert told(body, continued_of(known_after(body_of()), body)) == told(body, None)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that none continues, so many and so many bytes."""
    asked = [body_of([MESSAGES[0], {"role": "user", "content": str(place)}]) for place in range(40)]
    known = known_after(*asked)
    counts = [known.continued(body, "chat").shared for body in asked]  # type: ignore[union-attr]
    assert counts == [1] * (40 - known_body.MOST_HEADS) + [2] * known_body.MOST_HEADS
    monkeypatch.setattr(known_body, "MOST_BYTES", 3 * len(asked[0]))
    assert known_after(*asked).size < 3 * len(asked[0])
    held = "x" * (1 << 20)
    for body in (body_of(front=f'{{"z":"{held}",'), body_of(rest=f',"z":"{held}"}}')):
        assert known_after(body).size > 3 * len(held)  # A copy of the fields is kept, and what is sent of them.
    chain = [body_of([*MESSAGES, *MORE[3:] * turns]) for turns in range(10)]
    assert known_after(*chain).size < 2 * len(chain[-1])


def test_what_is_not_kept() -> None:
    small = body_of([{"role": "user", "content": "a"}])
    many = body_of([{"role": "user", "content": [0] * (known_body.MOST_VALUES + 1)}])
    huge = body_of([{"role": "user", "content": "x" * known_body.MOST_HEAD}])
    assert [parse_chat(body).layout for body in (small, many, huge)] == [None, None, None]


@pytest.mark.parametrize(
    "new", ["x" * (known_body.MOST_REST + 1), [0] * (known_body.MOST_REST_VALUES + 1)], ids=["long", "many values"]
)
def test_a_long_rest_is_not_read_on_the_event_loop(new: Any) -> None:
    assert known_after(body_of()).continued(body_of([*MESSAGES, {"role": "user", "content": new}]), "chat") is None


@pytest.mark.parametrize(("field", "is_known"), [("z", True), ("input_ids", False)])
def test_a_tail_counts_as_rest_unless_what_it_says_is_known(field: str, is_known: bool) -> None:
    rest = f',"{field}":{[1] * (known_body.MOST_REST_VALUES + 1)}}}'
    continued = known_after(body_of(rest=rest)).continued(body_of(MORE, rest=rest), "chat")
    assert (continued is not None) == is_known


@pytest.mark.parametrize("text", ["[", "{,", '"[\\"', "[\\"])
def test_what_is_in_strings_is_no_value(text: str) -> None:
    """JSON as a tool's result: as much as a limit of values allows, many times."""
    said = {"role": "user", "content": text * known_body.MOST_REST_VALUES}
    first = body_of([*MESSAGES, *[said] * 4])
    known = known_after(first)
    continued = continued_of(known, body_of([*MESSAGES, *[said] * 5]))
    assert continued is not None
    assert continued.layout.values < 300


def test_a_body_with_many_values_is_continued() -> None:
    """It is split in parts at first, which are copies."""
    messages = [{"role": "user", "content": [0] * 50} for _ in range(600)]
    first, second = body_of(messages), body_of([*messages, MESSAGES[1]])
    continued = continued_of(known_after(first), second)
    assert continued is not None
    assert told(second, continued) == told(second, None)


def asked_after(book: Book, known: KnownBodies, body: bytes) -> tuple[RequestHistory, ChatRequest]:
    request = parse_chat(body, False, continued_of(known, body))
    incoming = RequestHistory(request.messages, book.session.config.matcher, prefix=request.prefix)
    incoming.check(book.index)
    return incoming, request


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_a_known_history_is_hashed_as_an_unknown_one(history: Any) -> None:
    """Over turns of a session, with a retry, a rollback, and a beginning of an earlier turn."""
    book, known = Book(history=history, window=5, on_divergence="segment"), KnownBodies()
    talk: list[dict[str, Any]] = [{"role": "system", "content": LONG}, user("0")]
    asked = [talk]
    for place in range(1, 5):
        asked.append([*asked[-1], assistant(f"r{place}"), user(str(place))])
    asked += [asked[-1], asked[2], [*asked[1], assistant("r2"), user("other")], asked[0], asked[3]]
    whole = 0
    for place, messages in enumerate(asked):
        body = body_of([bytes(raw).decode() for raw in raws(messages)])
        incoming, request = asked_after(book, known, body)
        plain = RequestHistory([msgspec.Raw(bytes(raw)) for raw in request.messages], book.session.config.matcher)
        plain.check(book.index)
        whole += request.prefix is not None and request.prefix.prefix_hasher is not None
        assert incoming.whole_hash == plain.whole_hash
        assert incoming.join(book.session, book.index, None) == plain.join(book.session, book.index, None)
        counts = [*range(len(messages) + 1), *range(len(messages), -1, -1)]
        assert [incoming.prefix_hash(count) for count in counts] == [plain.prefix_hash(count) for count in counts]
        assert [incoming.canonical(n) for n in range(len(messages))] == [
            plain.canonical(n) for n in range(len(messages))
        ]
        assert incoming.prefix_hasher().hexdigest() == plain.prefix_hasher().hexdigest()
        reply = assistant(f"r{min(place + 1, 4)}")
        committed = book.turn(messages, reply)
        assert request.layout is not None
        keep(known, request.layout, committed.turn, incoming.prefix_hasher())
    assert whole >= 5
