"""Messages and Responses whose beginning is known are translated as if nothing were known of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.making import Book, assistant

from app.domain.history import RequestHistory
from app.domain.known_body import LONG_BODY, ContinuedBody, KnownBodies, KnownBody
from app.domain.request import ChatRequest
from app.errors import AppError
from app.protocols.messages.parse import parse_messages
from app.protocols.responses.parse import parse_responses
from app.turn.large_bodies import large_bytes, large_history
from workers.parse_prompt import Hasher

LONG = "lorem, [ipsum] {dolor} é " * (LONG_BODY // 20)
PROOF = "0123456789abcdef01234567"


class Wire(NamedTuple):
    """A protocol whose messages are translated, the field that holds them, and what may be among them."""

    name: str
    field: str
    parse: Callable[[bytes, bool, ContinuedBody | None], ChatRequest]
    system: str
    more: dict[str, Any]
    pieces: Sequence[dict[str, Any]]


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": [1]}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y"}}
MESSAGES = Wire(
    "messages",
    "messages",
    parse_messages,
    "system",
    {"model": "m", "max_tokens": 9},
    [
        said("user", text("a")),
        said("user", text("b", **MARK), IMAGE),
        {"role": "user", "content": ""},
        said("user", {"type": "tool_result", "tool_use_id": "c1", "content": "r"}, text("and")),
        said("assistant", {"type": "thinking", "thinking": "t", "signature": f"tl_{PROOF}"}),
        said("assistant", text("x")),
        said("assistant", CALL),
        said("assistant"),
        {"role": "system", "content": "late"},
        {"role": "system", "content": "x-anthropic-billing-header: 1"},
    ],
)
RESPONSES = Wire(
    "responses",
    "input",
    parse_responses,
    "instructions",
    {"model": "m"},
    [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_image", "image_url": "u"}]},
        {"role": "developer", "content": "late"},
        {"type": "reasoning", "id": "rs_x", "summary": [{"type": "summary_text", "text": "t"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": f"msg_{PROOF}",
            "content": [{"type": "output_text", "text": "x"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "in"},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "h", "parameters": {"type": "object"}}]},
        {"type": "item_reference", "id": f"msg_{PROOF}"},
    ],
)
WIRES = {wire.name: wire for wire in (MESSAGES, RESPONSES)}
OPENING = {"role": "user", "content": LONG}


def body_of(wire: Wire, messages: Sequence[Any], system: str = "be brief", **later: Any) -> bytes:
    """System's text and parameters stand behind the messages, as Claude Code writes them."""
    fields = {"metadata": {"user_id": "u"}} if wire is MESSAGES else {}
    return json.dumps(
        {**fields, wire.field: messages, wire.system: system, **wire.more, **later}, ensure_ascii=False
    ).encode()


def continued_of(known: KnownBodies, wire: Wire, body: bytes) -> ContinuedBody | None:
    return known.continued(body, wire.name)


def told(wire: Wire, body: bytes, continued: ContinuedBody | None) -> Any:
    """All of the parsed request but what is known of it, or its error."""
    try:
        request = wire.parse(body, False, continued)
    except AppError as error:
        return error.code, str(error)
    layout = request.layout
    places = None if layout is None else layout.places
    fields = msgspec.structs.asdict(request)
    del fields["layout"], fields["prefix"]
    return {**fields, "messages": [bytes(raw) for raw in request.messages], "places": places}


def keep(known: KnownBodies, wire: Wire, layout: KnownBody, turn: int, prefix_hasher: Hasher) -> None:
    """As a commit does."""
    continued = layout.continued
    layout.keep(wire.name, turn, prefix_hasher)
    known.add(layout, continued, 0)


def after(wire: Wire, *bodies: bytes) -> KnownBodies:
    """As after turns with these bodies."""
    found = KnownBodies()
    for turn, body in enumerate(bodies, 1):
        request = wire.parse(body, False, continued_of(found, wire, body))
        if request.layout is not None:
            keep(found, wire, request.layout, turn, hashlib.sha256())
    return found


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@given(data=st.data())
def test_a_continued_body_is_translated_as_a_new_one(wire: Wire, data: st.DataObject) -> None:
    """Wherever the known part ends, and whatever follows."""
    pieces = data.draw(st.lists(st.sampled_from(wire.pieces), max_size=10))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), min_size=1, max_size=3)))
    rest = data.draw(st.lists(st.sampled_from(wire.pieces), max_size=3))
    bodies = [body_of(wire, [OPENING, *pieces[:cut]]) for cut in cuts]
    try:
        known = after(wire, *bodies)
    except AppError:
        return
    keep = data.draw(st.integers(0, cuts[-1]))
    last = body_of(wire, [OPENING, *pieces[:keep], *rest], data.draw(st.sampled_from(["be brief", "be long"])))
    continued = continued_of(known, wire, last)
    if b"item_reference" not in bodies[-1]:
        assert continued is not None
    assert told(wire, last, continued) == told(wire, last, None)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize(
    "wrong", [5, {"role": "nobody"}, {"type": "nothing", "role": "user", "content": [{"type": "?"}]}]
)
def test_an_error_names_its_place(wire: Wire, wrong: Any) -> None:
    first = body_of(wire, [OPENING, wire.pieces[0]])
    body = body_of(wire, [OPENING, wire.pieces[0], wrong])
    continued = continued_of(after(wire, first), wire, body)
    assert continued is not None
    code, message = told(wire, body, continued)
    assert (code, message) == told(wire, body, None)
    assert f"{wire.field}[2]" in message


def test_a_body_of_another_protocol_is_not_continued() -> None:
    body = body_of(MESSAGES, [OPENING])
    assert after(MESSAGES, body).continued(body, "chat") is None


@pytest.mark.parametrize("later", [{"previous_response_id": f"resp_{PROOF}"}, {"messages": []}, {"input": [OPENING]}])
def test_fields_that_change_what_the_input_is(later: dict[str, Any]) -> None:
    first = body_of(RESPONSES, [OPENING, *RESPONSES.pieces[:3]])
    body = body_of(RESPONSES, [OPENING, *RESPONSES.pieces[:5]])[:-1] + b"," + json.dumps(later).encode()[1:]
    continued = continued_of(after(RESPONSES, first), RESPONSES, body)
    assert (continued is None) == ("input" in later)
    assert told(RESPONSES, body, continued) == told(RESPONSES, body, None)


def marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As Claude Code marks them: the last two."""
    *rest, (role, last) = [(one["role"], dict(one["content"][-1])) for one in messages]
    found = [said(role, block) for role, block in [*rest, (role, last)]]
    for one in found[-2:]:
        one["content"][-1].update(MARK)
    return found


def test_moved_marks_leave_a_history_known() -> None:
    """Their bytes are others each time; what they are translated into is the same."""
    book, known = Book(history="tree"), KnownBodies()
    talk = [said("user", text(LONG)), said("user", text("a")), said("user", text("b"))]
    for place in range(6):
        talk += [said("user", text(f"q{place}"))]
        body = body_of(MESSAGES, marked(talk))
        continued = continued_of(known, MESSAGES, body)
        request = parse_messages(body, False, continued)
        incoming = RequestHistory(request.messages, "tolerant", prefix=request.prefix)
        plain = RequestHistory([msgspec.Raw(bytes(raw)) for raw in request.messages], "tolerant")
        for one in (incoming, plain):
            one.check(book.index)
        assert incoming.whole_hash == plain.whole_hash
        assert incoming.prefix_hasher().hexdigest() == plain.prefix_hasher().hexdigest()
        assert incoming.join(book.session, book.index, None) == plain.join(book.session, book.index, None)
        if place:
            assert continued is not None
            assert continued.shared >= len(talk) - 4
            assert request.prefix is not None
            assert request.prefix.prefix_hasher is not None
        turn = book.turn([json.loads(bytes(raw)) for raw in request.messages], assistant(f"r{place}")).turn
        assert request.layout is not None
        keep(known, MESSAGES, request.layout, turn, incoming.prefix_hasher())
        talk += [said("assistant", text(f"r{place}"))]


TALK = [said(role, text("q " * 60_000)) for role in ("user", "assistant") * 8] + [said("user", text("and?"))]
TOLD = [*TALK, said("assistant", text("r")), said("user", text("more"))]


@pytest.mark.parametrize(
    ("messages", "system", "expected"),
    [
        (TOLD, "be brief", (False, False)),
        (TALK[:-2], "be brief", (False, True)),
        (TALK[:-6], "be brief", (True, True)),
        (TOLD, "be long", (False, True)),
    ],
    ids=["goes on", "goes back", "goes far back", "has another system prompt"],
)
def test_what_is_read_anew_of_a_known_body_is_read_on_a_thread(
    messages: Sequence[Any], system: str, expected: tuple[bool, bool]
) -> None:
    """Translation and history of 1 MiB and more had been read on the event loop, up to 250 ms."""
    book, known = Book(history="tree"), KnownBodies()
    request = parse_messages(body_of(MESSAGES, TALK), False, None)
    incoming = RequestHistory(request.messages, "tolerant")
    incoming.check(book.index)
    turn = book.turn([json.loads(bytes(raw)) for raw in request.messages], assistant("r")).turn
    assert request.layout is not None
    keep(known, MESSAGES, request.layout, turn, incoming.prefix_hasher())
    body = body_of(MESSAGES, messages, system)
    continued = continued_of(known, MESSAGES, body)
    assert continued is not None
    found = large_bytes(body, continued), large_history(body, parse_messages(body, False, continued), book.index)
    assert tuple(map(bool, found)) == expected
