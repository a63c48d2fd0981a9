"""The client's reading of NDJSON, however the bytes are cut, and where it goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog import NotTurnlog
from turnlog.client.lines import AllEventsPlace, EventsPlace, ExportPlace, Lines, cursor_of

ENDS_OF_LINES_ELSEWHERE = "\u2028\u2029\x85\x0b\x0c\r"


@given(st.lists(st.text(alphabet="aü" + ENDS_OF_LINES_ELSEWHERE, max_size=6), max_size=6), st.data())
def test_objects_come_whole_however_the_bytes_are_cut(texts: list[str], data: st.DataObject) -> None:
    content = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    lines = Lines()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        found += [line["text"] for line in lines.feed(content[start:end])]
    assert found == texts
    assert not list(lines.feed(b'{"half"'))


@pytest.mark.parametrize("line", [b"<html>\n", b"[1]\n", b"{'a': 1}\n", b"\xff\n"])
def test_what_is_no_object_is_another_service(line: bytes) -> None:
    with pytest.raises(NotTurnlog):
        list(Lines().feed(line))


@pytest.mark.parametrize(
    "row",
    [
        {"cursor": "c"},
        {"metadata": {"mine": 1, "turnlog": {"cursor": "c"}}},
        {"extra_fields": {"cursor": "c"}, "metadata": None},
        {"extra": {"cursor": "c"}},
    ],
)
def test_each_shape_has_its_place_for_the_cursor(row: dict[str, Any]) -> None:
    assert cursor_of(row) == "c"
    with pytest.raises(NotTurnlog):
        cursor_of({"metadata": {"cursor": "the user's own"}})


def test_an_export_goes_on_behind_its_last_row() -> None:
    place = ExportPlace({"limit": 3, "group_id": "g"})
    assert place.parameters() == {"limit": 3, "group_id": "g"}
    place.begin({"x-turnlog-cursor": "whole"})
    assert (place.cursor, place.next_cursor) == ("whole", None)
    place.read({"cursor": "first"})
    assert place.parameters() == {"limit": 2, "group_id": "g", "cursor": "first"}
    place.begin({"x-turnlog-cursor": "rest", "x-turnlog-next-cursor": "behind"})
    assert (place.cursor, place.next_cursor) == ("first", "behind")


def test_a_followed_log_ends_with_its_content() -> None:
    place = EventsPlace(3, follow=True)
    place.read({"seq": 4, "type": "TurnOpened"})
    assert (place.is_done, place.parameters()) == (False, {"after": 4, "follow": "true"})
    place.read({"seq": 9, "type": "SessionErased"})
    assert place.is_done
    assert EventsPlace(0, follow=False).is_done


def test_all_events_go_on_behind_the_last_position() -> None:
    place = AllEventsPlace({"after": "end", "follow": True, "limit": 2, "type": ["SessionClosed"]})
    assert place.parameters() == {"after": "end", "follow": "true", "limit": 2, "type": ["SessionClosed"]}
    assert place.position is None
    place.read({"position": "p1"})
    place.read({"position": "p2", "session_id": "s", "seq": 1, "type": "SessionClosed"})
    assert (place.position, place.is_done) == ("p2", False)
    assert place.parameters() == {"after": "p2", "follow": "true", "limit": 1, "type": ["SessionClosed"]}
    place.read({"position": "p3", "session_id": None, "seq": None, "type": None, "error": "damaged"})
    assert place.is_done
    assert AllEventsPlace({}).is_done
    with pytest.raises(NotTurnlog):
        place.read({"seq": 1})
