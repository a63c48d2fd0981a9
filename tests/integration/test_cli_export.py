"""`turnlog export`: interrupted at any byte it goes on, and what is there at the end is what one export gives."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from integration.cli import answer, complaint, run
from integration.cutting import CuttingRelay
from integration.stand import Stand

HEAD = 700
"""More bytes than the head of a reply has, and fewer than the rows."""


class Filled(NamedTuple):
    stand: Stand
    group: str

    def whole(self, **parameters: Any) -> bytes:
        """What one export gives that nothing interrupts."""
        response = self.stand.http.get("/export", params={"group_id": self.group, **parameters})
        assert response.status_code == 200, response.text
        return response.content


@pytest.fixture(scope="module")
def filled(shared: Stand) -> Filled:
    """A group of six sessions of two turns, closed."""
    group = uuid.uuid4().hex
    for number in range(6):
        talk = shared.talk(group_id=group)
        talk.say(f"Hello {number}")
        talk.say('And "lost_tokens":\non')
        shared.http.put(f"{talk.path}/reward", json={"reward": number / 4})
        shared.http.delete(talk.path)
    return Filled(shared, group)


@pytest.fixture
def cli(filled: Filled, clean_environment: Callable[..., None]) -> Filled:
    clean_environment(URL=filled.stand.server.base_url)
    return filled


def test_what_is_cut_or_does_not_match_is_told(cli: Filled, tmp_path: Path) -> None:
    wish = ("--group", cli.group, "--max-seq-len", "40")
    lines = map(json.loads, cli.whole(max_seq_len=40, explain=True).splitlines())
    lost = [row["lost_tokens"] for row in lines if "excluded" in row]
    told = [
        f"turnlog: left out or cut: {sum(lost)} sampled tokens",
        f"turnlog:   max_seq_len: {sum(lost)} sampled tokens, {len(lost)} lines",
    ]
    for name in ((), ("lines",), ("rows.msgpack",), ("rows.parquet",)):
        said = run("export", *(tmp_path / one for one in name), *wish, "--explain").stderr.splitlines()
        assert [line for line in said if "sampled" in line] == told
    assert (tmp_path / "rows.parquet").read_bytes().startswith(b"PAR1"), "the format is what the name ends in"
    assert answer("export", tmp_path / "json.msgpack", *wish, "--explain")["left_out"] == {
        "max_seq_len": {"lines": len(lost), "lost_tokens": sum(lost)}
    }
    hint = "--explain says what was left out, and why"
    assert hint in run("export", tmp_path / "short", *wish).stderr
    for asked in ((), ("--format", "msgpack")):  # what was said looks like what is counted
        assert "--explain" not in run("export", "--group", cli.group, *asked).stderr
    for number, (form, shape, _) in enumerate(FORMS):
        asked = ("--format", form, "--shape", shape)
        assert (
            "turnlog: no row matches\n" in run("export", tmp_path / f"none-{number}", "--group", "typo", *asked).stderr
        )
        most = ("--group", cli.group, "--max-reward", "-1")
        assert run("export", *most, *asked).stderr == f"turnlog: no row matches; {hint}\n"


FORMS = [
    ("ndjson", "turnlog", ()),
    ("ndjson", "slime", ("--explain",)),
    ("ndjson", "turnlog", ("--limit", "4")),
    ("atif", "turnlog", ()),
    ("parquet", "verl", ()),
    ("safetensors", "miles", ()),
]


@pytest.mark.parametrize(("format", "shape", "more"), FORMS)
def test_an_interrupted_export_goes_on_and_is_whole(
    cli: Filled, tmp_path: Path, format: str, shape: str, more: tuple[str, ...]
) -> None:
    """Cut three times: right behind the head, in the middle of the rows, and near their end."""
    parameters = {"format": format, "shape": shape}
    parameters |= {"explain": "true"} if "--explain" in more else {}
    parameters |= {"limit": more[1]} if "--limit" in more else {}
    whole = cli.whole(**parameters)
    file = tmp_path / "rows"
    with CuttingRelay(cli.stand.server.port, HEAD, HEAD + len(whole) // 2, HEAD + len(whole) // 4) as relay:
        command = ("export", file, "--group", cli.group, "--format", format, "--shape", shape, *more)
        for _ in range(3):
            line = complaint(*command, "--url", relay.base_url)
            assert line.endswith("what has arrived is kept, the same command continues from there")
            assert not file.exists()
        made = answer(*command, "--url", relay.base_url)
        assert relay.made == 4
    came = file.read_bytes()
    if format == "ndjson" and shape == "turnlog":
        assert [_without_cursor(line) for line in came.splitlines()] == [
            _without_cursor(line) for line in whole.splitlines()
        ]
    else:
        assert len(came) == len(whole)
    assert made["bytes"] == len(came)
    assert made["rows"] == (whole.count(b"\n") if format in ("ndjson", "messages", "atif") else None)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def _without_cursor(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(line)
    del row["cursor"]
    return row


def test_a_reward_between_two_runs_begins_the_file_anew(cli: Filled, tmp_path: Path) -> None:
    """Of a format whose rows cannot be told apart: what has come is not what would come now."""
    group = uuid.uuid4().hex
    talks = [cli.stand.talk(group_id=group) for _ in range(3)]
    for talk in talks:
        talk.say("Hello")
    file = tmp_path / "rows"
    whole = cli.stand.http.get("/export", params={"group_id": group, "format": "msgpack"}).content
    command = ("export", file, "--group", group, "--format", "msgpack")
    with CuttingRelay(cli.stand.server.port, HEAD + len(whole) // 2) as relay:
        complaint(*command, "--url", relay.base_url)
        cli.stand.http.delete(talks[0].path, params={"erase": "true"})
        notes = json.loads((tmp_path / "rows.partial.json").read_bytes())
        run(*command, "--url", relay.base_url)
    now = cli.stand.http.get("/export", params={"group_id": group, "format": "msgpack", "cursor": notes["cursor"]})
    assert len(now.content) < len(whole)
    assert len(file.read_bytes()) == len(cli.stand.http.get("/export", params=notes["wish"]).content)


def test_what_is_there_is_not_overwritten_by_accident(cli: Filled, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text("precious")
    assert "already exists" in complaint("export", file)
    assert file.read_text() == "precious"
    run("export", file, "--group", cli.group, "--overwrite")
    assert file.read_bytes().count(b"\n") == 6


def test_another_wish_does_not_go_on_with_what_has_come(cli: Filled, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    with CuttingRelay(cli.stand.server.port, HEAD + 5000) as relay:
        complaint("export", file, "--group", cli.group, "--url", relay.base_url)
        other = ("export", file, "--group", cli.group, "--min-reward", "0.5", "--url", relay.base_url)
        assert "--restart starts over" in complaint(*other)
        assert answer(*other, "--restart")["rows"] == 4


def test_what_cannot_begin_leaves_nothing(cli: Filled, tmp_path: Path) -> None:
    assert "invalid_request" in complaint("export", tmp_path / "rows", "--format", "csv")
    assert "invalid_request" in complaint("export", tmp_path / "rows", "--cursor", "nonsense")
    assert list(tmp_path.iterdir()) == []
    assert "nowhere" in complaint("export", tmp_path / "nowhere" / "rows")


@pytest.mark.parametrize("file", [(), ("-",)])
def test_without_a_file_the_bytes_go_to_standard_output(
    cli: Filled, file: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("export", *file, "--group", cli.group, "--format", "parquet")
    assert result.stdout_bytes == cli.whole(format="parquet")
    assert list(tmp_path.iterdir()) == []
