"""The real load: its notice, what engine and clients cut from the same material, and that its comparison finds what is
wrong in rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ops.bench.real.conversation import WIRES, Conversation
from ops.bench.real.material import SIZE, TRIPLE, Material, Tag
from ops.bench.real.play import SAMPLE, Compared, compare, sample

MATERIAL = Material("json", spaced=True)


def test_the_sample_stands_beside_its_notice() -> None:
    notice = SAMPLE.with_name("README.md").read_text()
    read = sample()
    assert "callanjfox/kv-cache-tester" in read.source
    assert all(word in notice for word in ("callanjfox/kv-cache-tester", "Apache-2.0", SAMPLE.name))
    assert len(read.sessions) == 64
    # What the clients do not play: sub-agents.
    assert {turn[0] for session in read.sessions for turn in session.turns} == {0}


def test_a_list_goes_on_where_the_material_begins_again() -> None:
    run = (SIZE - 2, 5)
    ids = MATERIAL.tokens([run]).tolist()
    assert ids[2:] == MATERIAL.tokens([(0, 3)]).tolist()
    assert json.loads(b"[" + b"".join(MATERIAL.ids_text([run])) + b"]") == ids
    for attempt in (1, 2):
        triples = json.loads(b"[" + b",".join(MATERIAL.entries(TRIPLE, run, attempt)) + b"]")
        expected = zip(MATERIAL.logprobs(run, attempt).tolist(), ids, strict=True)
        assert triples == [[logprob, token, None] for logprob, token in expected]
    assert not np.array_equal(MATERIAL.logprobs(run), MATERIAL.logprobs(run, 2))


def test_a_tag_says_the_turn() -> None:
    tag = Tag("s1-2", [(5, 7), (100, 2)], (102, 40), True)
    body = b'{"messages":[{"content":"<turn s0-1 1+2,3+4 0> a"},{"content":"' + tag.text() + b'b > c"}]}'
    assert Tag.newest_in(body) == tag
    number = Tag("1002", [], (102, 40))
    assert Tag.last_ids_in(b"7," + number.ids()) == number._replace(prompt=())


def _rows() -> tuple[Conversation, list[dict[str, Any]]]:
    """A conversation that was begun anew in its third turn, and its rows."""
    conversation = Conversation(1, 30, MATERIAL, WIRES["chat"])
    for kept in (None, None, 0):
        conversation.ask(20, 10, kept=kept)
        tag = conversation.tag
        message = b'{"role":"assistant","content":"' + MATERIAL.said(tag, 1)[0] + b'"}'
        assert conversation.answered(b'{"choices":[{"index":0,"message":' + message + b"}]}")
    rows = []
    for turn in (1, 2):
        ids, logprobs, places = conversation.row(turn)
        mask = ~np.isnan(logprobs)
        last = places[turn]
        row = {
            "tokens": ids.tolist(),
            "loss_mask": mask.astype(int).tolist(),
            "logprobs": np.where(mask, logprobs, 0.0).tolist(),
            "weight_versions": np.where(mask, 7, -1).tolist(),
            "turns": [{"turn": turn + 1, "output_start": last.start, "end": last.stop}],
        }
        rows.append(row)
    return conversation, rows


def _set(row: dict[str, Any], field: str, place: int, value: object) -> None:
    row[field][place] = value


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda rows: None, Compared(2, 3)),
        (lambda rows: rows.pop(), Compared(1, 3, lost=1)),
        (lambda rows: rows.append(rows[1]), Compared(3, 3, doubled=1)),
        (lambda rows: _set(rows[0], "tokens", 0, 1), Compared(2, 3, differing=1)),
        (lambda rows: _set(rows[0], "logprobs", 55, -0.5), Compared(2, 3, differing=1)),
        (lambda rows: _set(rows[0], "loss_mask", 0, 1), Compared(2, 3, differing=1)),
        (lambda rows: _set(rows[0], "loss_mask", 55, 0), Compared(2, 3, differing=1, lost=1)),
        (lambda rows: _set(rows[0], "weight_versions", 55, 6), Compared(2, 3, differing=1)),
    ],
)
def test_what_is_wrong_in_rows_is_found(damage: Callable[[list[dict[str, Any]]], None], expected: Compared) -> None:
    conversation, rows = _rows()
    damage(rows)
    assert compare(rows, conversation) == expected
