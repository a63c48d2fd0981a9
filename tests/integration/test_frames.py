"""An export as a frame or a dataset, where the packages are installed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration.stand import Stand
from ops.server import ROOT
from turnlog import AsyncTurnlog, Turnlog
from turnlog.client import frames
from turnlog.client.traces import write_traces


def frame_of(package: str, rows: list[Any]) -> Any:
    return getattr(frames, METHODS[package])(rows)


VALUES: tuple[list[Any], ...] = (
    *([[1], [2**40]], [[1, 0.5], []], [[], []], [[[1, 2], [3]], [[]], []], [None, [True, False]], [None, None]),
    *([1, None], [1, 0.5], [1, [], {"a": "b"}], ["a", None], [["a"], []], [{"a": 1}, {"b": [1]}], [[1, None], [2]]),
    *([[0.5, None], [2]], [[1, [2]], 3], [0, []], [[1], [[1]]], [True, 1], [2**62, -1]),
)


METHODS = {"pandas": "to_pandas", "polars": "to_polars", "datasets": "to_dataset"}


@pytest.fixture(scope="module")
def group(shared: Stand) -> str:
    """Two sessions of unequal lengths; the second has no reward, but metadata."""
    with Turnlog(shared.server.base_url) as client:
        for number in range(2):
            metadata = {"number": [number]} if number else None
            with client.create_session(group_id="frames", attempt=number, metadata=metadata) as session:
                talk = shared.known(session.id)
                for turn in range(number + 1):
                    talk.say(f"Turn {turn}")
                if number == 0:
                    session.set_reward(1.0)
    return "frames"


@pytest.fixture
def client(stand: Stand) -> Iterator[Turnlog]:
    with Turnlog(stand.server.base_url) as made:
        yield made


def read(package: str, frame: Any) -> list[dict[str, Any]]:
    """The frame's rows, with lists for arrays."""
    if package == "pandas":
        return [dict(row) for _, row in frame.iterrows()]
    return frame.to_dicts() if package == "polars" else frame.to_list()


@pytest.mark.parametrize("package", METHODS)
@pytest.mark.parametrize("shape", ["turnlog", "slime", "verl"])
def test_a_frame_has_the_rows_of_the_export(package: str, shape: Any, client: Turnlog, group: str) -> None:
    pytest.importorskip(package)
    rows: list[Any] = list(client.export(shape=shape, group_id=group))
    export = client.export(shape=shape, group_id=group)
    frame = getattr(export, METHODS[package])()
    assert export.cursor == list_cursor(client, shape, group)
    made = read(package, frame)
    assert len(made) == len(rows) > 0
    for row, one in zip(rows, made, strict=True):
        assert {name: value for name, value in one.items() if name in row}.keys() == row.keys()
        for name, value in row.items():
            assert same(one[name], value), (name, one[name], value)


def list_cursor(client: Turnlog, shape: Any, group: str) -> str | None:
    export = client.export(shape=shape, group_id=group)
    list(export)
    return export.cursor


def same(made: Any, value: Any) -> bool:
    """Is it the value as a frame has it: an array, JSON text, or for a missing number NaN?"""
    if value is None:
        return made is None or bool(made != made)
    if isinstance(made, np.ndarray):
        return made.dtype != object and made.tolist() == value
    if isinstance(made, str) and not isinstance(value, str):
        return bool(json.loads(made) == value)
    if isinstance(made, list):
        return len(made) == len(value) and all(map(same, made, value))
    return bool(made == value)


def test_a_missing_package_is_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asynchronously(method: str) -> None:
        async with AsyncTurnlog("http://127.0.0.1:9") as client:
            await getattr(client.export(), method)()

    for package, method in METHODS.items():
        monkeypatch.setitem(sys.modules, package, None)
        with (
            Turnlog("http://127.0.0.1:9") as client,
            pytest.raises(ModuleNotFoundError, match=f"pip install {package}"),
        ):
            getattr(client.export(), method)()
        with pytest.raises(ModuleNotFoundError, match=rf"{method}\(\) needs {package}"):
            asyncio.run(asynchronously(method))


def test_the_notebook_runs(stand: Stand, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.setenv("TURNLOG_URL", stand.server.base_url)
    notebook = json.loads((ROOT / "docs" / "guides" / "exported-rows.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    names["turnlog"].close()
    assert names["rewards"].loc[group]["mean"] == 1.0


def test_traces_are_of_the_hub_s_format(client: Turnlog, group: str, tmp_path: Path) -> None:
    rows = list(client.export(group_id=group))
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    rows[0]["messages"] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be\u2028brief."}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "A tree."},
    ]
    files = write_traces(tmp_path / "traces", rows)
    [first, second] = [[json.loads(line) for line in file.read_bytes().splitlines()] for file in files]
    assert {first[0]["type"], second[0]["type"]} == {"session"}
    assert first[0]["id"] != second[0]["id"]
    assert first[1:] == [
        {"type": "message", "message": message}
        for message in (
            {"role": "system", "content": "Be\u2028brief."},
            {
                "role": "assistant",
                "content": "",
                "reasoningContent": "Hm.",
                "toolCalls": [{"id": "call-1", "function": {"name": "look", "arguments": '{"at": 1}'}}],
            },
            {"role": "tool", "content": "A tree.", "toolCallId": "call-1"},
        )
    ]
    assert [line["message"]["content"] for line in second[1:]] == [one["content"] for one in rows[1]["messages"]]


def test_lists_have_types(client: Turnlog, group: str) -> None:
    pandas, polars, datasets = map(pytest.importorskip, METHODS)
    rows = list(client.export(group_id=group))
    frame = frames.to_pandas(rows)
    assert [array.dtype for array in frame["tokens"]] == [np.int32] * 2
    assert [array.dtype for array in frame["logprobs"]] == [np.float64] * 2
    assert isinstance(frame["messages"][0], list)
    assert isinstance(frame["metadata"][1], dict)
    assert isinstance(frame, pandas.DataFrame)
    schema = frames.to_polars(rows).schema
    assert (schema["tokens"], schema["logprobs"]) == (polars.List(polars.Int32), polars.List(polars.Float64))
    features = frames.to_dataset(rows).features
    assert features["tokens"] == datasets.List(datasets.Value("int32"))
    assert features["logprobs"] == datasets.List(datasets.Value("float64"))
    assert features["messages"] == datasets.Value("string")


@pytest.mark.parametrize("package", METHODS)
def test_any_values_come_back(package: str) -> None:
    pytest.importorskip(package)
    for values in VALUES:
        made = read(package, frame_of(package, [{"id": str(n), "value": value} for n, value in enumerate(values)]))
        found = [one["value"] for one in made]
        assert all(same(one, value) or one == value for one, value in zip(found, values, strict=True)), values
