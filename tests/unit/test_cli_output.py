"""What people see on a terminal: whole ids, nothing that steers the terminal, and no more than there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.cli.output import GAP, Column, compact, duration, fitting, plain, shown, size, table

COLUMNS = [
    Column("session", whole=True),
    Column("turns", right=True),
    Column("engine", long=True),
    Column("created"),
]
ID = "a" * 70


def printed(capsys: pytest.CaptureFixture[str], width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    monkeypatch.setenv("COLUMNS", str(width))
    records = [
        {"session": ID, "turns": 3, "engine": "http://engine-of-a-long-name.example:30000", "created": "2026-11-21"},
        {"session": "b", "turns": None, "engine": "x", "created": ""},
    ]
    table(COLUMNS, records)
    said = capsys.readouterr()
    return said.out.splitlines(), said.err


def test_a_narrow_one_keeps_ids_whole_and_says_what_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, missing = printed(capsys, 100, monkeypatch)
    assert lines[1].startswith(ID)
    assert "http://engine-o…" in lines[1]
    assert missing == "no room for: created\n"
    lines, missing = printed(capsys, 20, monkeypatch)
    assert [line.split() for line in lines] == [["session"], [ID], ["b"]]
    assert missing == "no room for: turns, engine, created\n"


@given(st.lists(st.integers(1, 60), min_size=len(COLUMNS), max_size=len(COLUMNS)), st.integers(1, 250))
def test_what_is_shown_fits_or_is_only_what_must_be_whole(natural: list[int], room: int) -> None:
    widths = fitting(COLUMNS, natural, room)
    assert widths[0] == natural[0]
    assert all(widths[at] <= natural[at] for at in widths)
    used = sum(widths.values()) + GAP * (len(widths) - 1)
    assert used <= room or list(widths) == [0]
    if sum(natural) + GAP * (len(natural) - 1) <= room:
        assert list(widths.values()) == natural


def test_text_of_agents_does_not_reach_the_terminal_as_commands() -> None:
    assert plain("\x1b[2J\x07\r\nü\x9b") == "\\x1b[2J\\x07\\x0d\\x0aü\\x9b"
    assert shown("[red]x[/red]\x1b") == "[red]x[/red]\\x1b"
    assert compact({"a": "\x1b" * 3, "long": "x" * 100, "n": [1, None]}, 10) == (
        "a=\\x1b\\x1b\\x1b long=" + "x" * 9 + "… n=[1,null]"
    )


def test_numbers_are_short() -> None:
    assert [shown(value) for value in (None, "", [], True, 0.25, 12.3456, 3, ["a", None])] == [
        *("–", "–", "–", "yes", "0.25", "12.35", "3", "a, –")
    ]
    assert [duration(seconds) for seconds in (0, 119, 120, 7199, 7200, 200_000)] == [
        *("0 s", "119 s", "2 min", "120 min", "2 h", "2 d")
    ]
    assert [size(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        *("0 bytes", "1023 bytes", "1.0 KiB", "5.0 MiB", "3072.0 GiB")
    ]
