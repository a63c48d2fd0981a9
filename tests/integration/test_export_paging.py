"""Cursors of every shape, whole groups, documents, and exports of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.corpus import SHAPES, Corpus, filled, identity
from integration.places import Places
from integration.reading import CONTAINERS, DOCUMENTS, Row, read
from integration.stand import WEATHER
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def corpus(sglang: SimulatorProcess, places: Places) -> Iterator[Corpus]:
    with filled(places.new("shapes"), sglang.base_url) as made:
        yield made


@pytest.mark.parametrize(
    ("query", "explain"), [({}, "true"), ({"status": "completed"}, "false"), ({"max_seq_len": 120}, "true")]
)
@pytest.mark.parametrize("shape", [*SHAPES, *DOCUMENTS])
def test_every_rows_cursor_gives_what_is_behind_it(
    corpus: Corpus, shape: str, query: dict[str, Any], explain: str
) -> None:
    chosen = {"format": shape} if shape in DOCUMENTS else {"shape": shape}
    asked = {**chosen, **query, "explain": explain, "advantage": "grpo"}
    whole = corpus.get(**asked).splitlines()
    assert len(whole) > (shape != "atropos")
    page, seen = {**asked, "limit": 1}, []
    while lines := corpus.get(**page).splitlines():
        seen += lines
        assert len(lines) == 1
        [row] = read("ndjson", lines[0])
        page["cursor"] = cursor_of(shape, row)
    assert seen == whole
    for place in range(0, len(whole), 3):
        [row] = read("ndjson", whole[place])
        assert corpus.get(**{**asked, "cursor": cursor_of(shape, row)}).splitlines() == whole[place + 1 :]


def cursor_of(shape: str, row: Row) -> str:
    if "excluded" in row:
        found: str = row["cursor"]
    else:
        found = row["extra"]["cursor"] if shape == "atif" else identity(shape, row)["cursor"]
    return found


def test_atropos_has_a_whole_group_at_the_place_of_its_last_session(corpus: Corpus) -> None:
    rows = corpus.given(shape="atropos", replay="false")
    assert [row["group_id"] for row in rows] == [None, None, "7"]
    members = ("tools", "split", "split", "cut", "last")
    by_session = {corpus.talks[name].id: name for name in members}
    whole = rows[-1]
    assert [by_session[one] for one in whole["session_ids"]] == sorted(members, key=lambda n: corpus.talks[n].id)
    for place, (session_id, segment) in enumerate(zip(whole["session_ids"], whole["segments"], strict=True)):
        row = corpus.turnlog(session_id, segment)
        mask = row["loss_mask"]
        assert whole["tokens"][place] == row["tokens"]
        assert whole["masks"][place] == [t if m else -100 for t, m in zip(row["tokens"], mask, strict=True)]
        assert whole["inference_logprobs"][place] == [
            one if m else 1.0 for one, m in zip(row["logprobs"], mask, strict=True)
        ]
        assert whole["advantages"][place] == [row["advantage"] if m else 0.0 for m in mask]
        assert (whole["scores"][place], whole["statuses"][place]) == (row["reward"], row["status"])
    assert corpus.left_out(shape="atropos") != []


def test_atropos_says_why_a_group_is_missing(corpus: Corpus) -> None:
    told = {corpus.name_of(row["session_id"]): row["excluded"] for row in corpus.left_out(shape="atropos")}
    assert told["named"] == "no reward for 1 of the group's 1 rows"
    assert (told["empty"], told["gone"], told["undone"]) == ("no committed turn", "erased", "rolled back")


@pytest.mark.parametrize("format", DOCUMENTS)
def test_documents_hold_the_conversation_and_the_tokens(corpus: Corpus, format: str) -> None:
    rows = corpus.given(format=format)
    assert len(rows) == len([row for row in corpus.rows if "excluded" not in row])
    for row in rows:
        known = row["extra"] if format == "atif" else row
        whole = corpus.turnlog(row["session_id"], known["segment"])
        if format == "messages":
            assert row["messages"] == whole["messages"]
            continue
        steps = [step for step in row["steps"] if "metrics" in step]
        assert len(steps) == len(whole["turns"])
        for step, span in zip(steps, whole["turns"], strict=True):
            metrics = step["metrics"]
            assert metrics["prompt_token_ids"] == whole["tokens"][: span["output_start"]]
            assert metrics["completion_token_ids"] == whole["tokens"][span["output_start"] : span["end"]]
            assert metrics["logprobs"] == whole["logprobs"][span["output_start"] : span["end"]]
    tools = next(row for row in rows if row["session_id"] == corpus.talks["tools"].id)
    if format == "atif":
        calls = next(step for step in tools["steps"] if "tool_calls" in step)["tool_calls"]
        observed = next(step for step in tools["steps"] if "observation" in step)["observation"]["results"]
        assert {call["function_name"] for call in calls} == {"weather"}
        assert {type(call["arguments"]) for call in calls} == {dict}
        assert [(one["source_call_id"], one["content"]) for one in observed] == [
            (call["tool_call_id"], "22 °C") for call in calls
        ]
    else:
        assert tools["tools"] == [WEATHER]


@pytest.mark.parametrize("explain", ["true", "false"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", CONTAINERS)
def test_an_empty_export_is_a_readable_file(corpus: Corpus, format: str, shape: str, explain: str) -> None:
    query = {"format": format, "shape": shape, "session_id": "nobody", "explain": explain}
    response = corpus.stand.http.get("/export", params=query)
    assert response.status_code == 200
    assert read(format, response.content) == []
    assert "x-turnlog-next-cursor" in response.headers


@pytest.mark.parametrize("format", [*CONTAINERS, *DOCUMENTS])
def test_what_only_explain_would_give_is_an_empty_file(corpus: Corpus, format: str) -> None:
    assert read(format, corpus.get(format=format, session_id=corpus.talks["empty"].id)) == []
    [row] = read(format, corpus.get(format=format, session_id=corpus.talks["empty"].id, explain="true"))
    assert row["excluded"] == "no committed turn"
