"""What the page says of a message in a line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tables import rows

from turnlog.actions import (
    LINE,
    TASK,
    Action,
    actions_of,
    common_heads,
    has_failed,
    result_line,
    task_of,
    task_text,
    without_head,
)


def calls(*given: tuple[str, Any]) -> dict[str, Any]:
    made = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(given)
    ]
    return {"role": "assistant", "content": "I will look.", "tool_calls": made}


def said(content: object, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (calls(("bash", '{"command": "pytest -q"}')), [("bash", "pytest -q")]),
        (calls(("shell", {"command": ["bash", "-lc", "ls -la"]})), [("shell", "ls -la")]),
        (calls(("shell", '{"command": ["git", "log"], "timeout": 5}')), [("shell", "git log, timeout 5")]),
        (calls(("bash", json.dumps({"command": "cat > a <<E\nx\nE"}))), [("bash", "cat > a <<E …")]),
        (
            calls(("edit", json.dumps({"file_path": "a.py", "old": "x" * 99, "all": True}))),
            [("edit", "a.py, all true")],
        ),
        (calls(("get_weather", '{"city": "Bonn"}'), ("now", "{}")), [("get_weather", "Bonn"), ("now", "")]),
        (calls(("f", '{"days": 2, "city": "Bonn", "deep": {}}')), [("f", "days 2, city Bonn")]),
        (calls(("f", "not json\nat all")), [("f", "not json …")]),
        (calls(("f", "[" * 99_999)), [("f", "[" * (LINE - 2) + " …")]),
        (calls(("f", None), ("f", "[1, 2]"), ("", '"x"')), [("f", ""), ("f", "[1, 2]"), ("?", '"x"')]),
        (said(None, function_call={"name": "old", "arguments": '{"q": "x"}'}), [("old", "x")]),
        (said("<think>long\nthought</think>\n\n  Done.\n\nMore"), [(None, "Done. …")]),
        (said("<think>no end"), [(None, "no end")]),
        (said([{"type": "text", "text": "A"}, {"type": "image_url"}]), [(None, "A …")]),
        (said("", reasoning_content="Hm."), [(None, "Hm.")]),
        (calls(("f", '{"a": "x\\ny", "b": "\\ud800"}')), [("f", "a x y, b ?")]),
        (said(None, refusal="I cannot."), [(None, "I cannot.")]),
        (said("x" * 999), [(None, "x" * (LINE - 2) + " …")]),
        (said(None, tool_calls=["odd", {"function": 7}]), [("?", ""), ("?", "")]),
        ({"role": "user", "content": "Hi"}, []),
        (None, []),
    ],
)
def test_an_action_in_a_line(message: object, expected: list[tuple[str | None, str]]) -> None:
    assert actions_of([message]) == [Action(*one) for one in expected]


@pytest.mark.parametrize(("content", "line"), rows("actions_results"))
def test_a_result_in_a_line(content: object, line: str) -> None:
    assert result_line({"role": "tool", "content": content}) == line


@pytest.mark.parametrize(
    ("message", "failed"), [pytest.param(*case, id=name) for name, *case in rows("actions_failures")]
)
def test_whether_a_result_says_that_its_call_failed(message: object, failed: bool) -> None:
    assert has_failed(message) == failed


@pytest.mark.parametrize(
    ("messages", "task"),
    [
        (["Once upon\na time"], "Once upon …"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}], "Hi"),
        ([{"role": "user", "content": [{"text": "<env>x"}, {"text": "Mend it"}]}], "Mend it"),
        ([{"role": "user", "content": "<env>x"}, {"role": "assistant", "content": "So"}], "<env>x"),
        ([{"role": "system", "content": "Be brief."}, {"role": "tool", "content": "7"}], "7"),
        ([None, {"role": "user", "content": [7, None, {"text": 7}]}], "7"),
        ([], ""),
    ],
)
def test_a_task_in_a_line(messages: list[object], task: str) -> None:
    assert task_of(messages) == task


def test_tasks_are_told_apart() -> None:
    long = [{"role": "user", "content": f"Find\n the bug\t{'x' * 1000}"}]
    assert task_text(long)[:14] == "Find the bug x"
    assert len(task_text(long)) == TASK
    head = "You are in a repository. There is a "
    bugs = [f"{head}bug in {name}" for name in ("parse_args", "parse_body", "decode", "decode")]
    sums = [f"What is the sum of {number} and 1?" for number in range(3)]
    short = [f"Write poem {number}" for number in range(3)]
    heads = common_heads([*bugs, *sums, *short, ""])
    assert heads == [f"{head}bug in "]
    assert [without_head(task, heads) for task in (*bugs[:2], sums[0], "")] == [
        "… parse_args",
        "… parse_body",
        sums[0],
        "",
    ]
    assert common_heads([f"{head}bug"] * 8) == []
    assert common_heads([head + "bug", head + "bug in it"]) == [head + "bug "]
