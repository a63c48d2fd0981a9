"""`turnlog doctor`: each thing that can be wrong is found, and said with what to do; no secret is."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.extras import release
from app.store.database import sqlite_lock
from turnlog.cli.commands import app_of
from turnlog.cli.doctor import postgres, store
from turnlog.cli.doctor.findings import Level

Environment = Callable[..., None]


def examined(*arguments: str, code: int) -> list[dict[str, Any]]:
    """What the command found. The address is one where nobody listens."""
    given = ["doctor", "--url", "http://127.0.0.1:9", "--json", *arguments]
    result = CliRunner().invoke(app_of(), given)
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stderr == ""
    said = json.loads(result.stdout)
    findings: list[dict[str, Any]] = said["findings"]
    assert {level: said[level] for level in Level} == {
        level: sum(one["level"] == level for one in findings) for level in Level
    }
    assert all(one["todo"] for one in findings if one["level"] != "ok")
    return findings


def of(findings: list[dict[str, Any]], area: str, level: str) -> list[str]:
    return [one["what"] for one in findings if one["area"].startswith(area) and one["level"] == level]


def test_every_mistake_in_the_settings_is_found_at_once(clean_environment: Environment) -> None:
    clean_environment(
        WORKERS="many", LEASE_S="0", UPSTREMS="http://x", THEME="dark", ADMIN_TOKEN="canary,,", CRASH_POINT="nonsense"
    )
    findings = examined(code=1)
    problems = " | ".join(of(findings, "settings", "problem"))
    for variable in ("WORKERS", "LEASE_S", "ADMIN_TOKEN", "CRASH_POINT"):
        assert f"TURNLOG_{variable}" in problems
    assert "TURNLOG_UPSTREMS is not a setting: did you mean TURNLOG_UPSTREAMS?" in problems
    assert of(findings, "settings", "warning") == ["TURNLOG_THEME is not a setting and is ignored"]
    assert "canary" not in json.dumps(findings)
    assert os.environ["TURNLOG_WORKERS"] == "many"


def test_tokens_that_can_be_guessed(clean_environment: Environment, tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'turnlog.db'}"
    clean_environment(DATABASE_URL=url, ADMIN_TOKEN=f"canary,{'a' * 40},a-good-one-of-thirty-characters", WORKERS="3")
    findings = examined(code=1)
    [told] = of(findings, "settings", "ok")
    assert told == "TURNLOG_ADMIN_TOKEN, TURNLOG_DATABASE_URL, TURNLOG_WORKERS=3; the others have defaults"
    [weak] = of(findings, "tokens", "warning")
    assert weak.startswith("TURNLOG_ADMIN_TOKEN: number 1, 2 ")
    assert of(findings, "tokens", "ok") == ["an admin token is set, and 2 older ones that still count"]
    assert "canary" not in json.dumps(findings)


def test_keys_of_upstreams_that_are_words(clean_environment: Environment, tmp_path: Path) -> None:
    upstreams = {name: {"url": "http://x", "key": key} for name, key in (("a", "canary"), ("b", "canary" * 3))}
    url = f"sqlite+aiosqlite:///{tmp_path / 'turnlog.db'}"
    clean_environment(DATABASE_URL=url, TEXT_UPSTREAMS=json.dumps(upstreams))
    findings = examined(code=1)
    [word] = [what for what in of(findings, "settings", "warning") if "TEXT_UPSTREAMS" in what]
    assert word.startswith("TURNLOG_TEXT_UPSTREAMS: the key of a has fewer than 16 characters")
    assert "canary" not in json.dumps(findings)


def test_everybody_is_an_admin(clean_environment: Environment, tmp_path: Path) -> None:
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{tmp_path / 'turnlog.db'}", TRUSTED_NETWORKS="0.0.0.0/0")
    [open_to_all] = of(examined(code=1), "tokens", "problem")
    assert "whoever reaches the port is an admin" in open_to_all


def test_what_is_sound_and_what_will_be_made(clean_environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "turnlog.db"
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{file}", REPLAY="routed_experts")
    findings = examined(code=1)
    assert of(findings, "engines", "problem") == ["no engine is known"]
    assert of(findings, "database", "ok") == [f"{file} does not exist yet: turnlog serve creates it"]
    assert len(of(findings, "disk", "ok")) + len(of(findings, "disk", "warning")) == 2  # a busy disk syncs slowly
    assert any("TURNLOG_REPLAY" in what for what in of(findings, "settings", "warning"))
    assert not file.exists()


def test_a_store_of_another_revision(clean_environment: Environment, sqlite_url: str, tmp_path: Path) -> None:
    file = tmp_path / "turnlog.db"
    file.chmod(0o600)
    clean_environment(DATABASE_URL=sqlite_url)
    findings = examined(code=1)
    assert of(findings, "database", "problem") + of(findings, "database", "warning") == []
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DELETE FROM alembic_version")
        connection.commit()
    file.chmod(0o644)
    findings = examined(code=1)
    assert [what.startswith("at revision none, ") for what in of(findings, "database", "problem")] == [True]
    assert of(findings, "database", "warning") == [f"{file} may be read by other users; it holds prompts and replies"]
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
        connection.commit()
    [other] = [one for one in examined(code=1) if (one["area"], one["level"]) == ("database", "problem")]
    assert other["what"].startswith("at revision 9999, ")
    assert f"install {release()} or newer" in other["todo"]
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE store_meta")  # as in another program's file
        connection.commit()
    assert [what.startswith("at revision 9999, ") for what in of(examined(code=1), "database", "problem")] == [True]


@pytest.mark.parametrize("place", ["file/turnlog.db", "folder"])
def test_what_cannot_be_a_store(clean_environment: Environment, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{tmp_path / place}")
    findings = examined(code=1)
    wrong = of(findings, "disk", "problem") + of(findings, "database", "problem")
    assert len(wrong) == 1
    assert "folder" in wrong[0]
    assert str(tmp_path) in wrong[0]


def test_a_file_that_is_no_store(clean_environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "turnlog.db"
    file.write_bytes(b"no database" * 1000)
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{file}")
    assert "file is not a database" in of(examined(code=1), "database", "problem")[0]


def test_who_serves_the_store(clean_environment: Environment, sqlite_url: str) -> None:
    clean_environment(DATABASE_URL=sqlite_url)
    assert "no process serves it" in of(examined(code=1), "database", "ok")
    lock = sqlite_lock(sqlite_url)
    assert lock is not None
    with lock:
        served = [what for what in of(examined(code=1), "database", "ok") if "serves it: a second" in what]
    assert served == [f"process {os.getpid()} serves it: a second one would refuse to start"]


def test_what_cannot_be_reached(clean_environment: Environment, tmp_path: Path) -> None:
    clean_environment(DATABASE_URL="postgresql+asyncpg://u:canary@127.0.0.1:9/x", UPSTREAMS="http://127.0.0.1:9")
    findings = examined("--no-generate", code=1)
    [database] = of(findings, "database", "problem")
    assert database.startswith("it cannot be reached: ")
    [engine] = of(findings, "engine", "problem")
    assert engine.startswith("it cannot be reached (NotSent")
    assert "canary" not in json.dumps(findings)


def test_a_tokenizer_that_is_none(clean_environment: Environment, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    url = f"sqlite+aiosqlite:///{tmp_path / 'turnlog.db'}"
    clean_environment(DATABASE_URL=url, TOKENIZER=str(tmp_path))
    [what] = of(examined(code=1), "tokenizer", "problem")
    assert "no tokenizer can be loaded" in what


SOUND = postgres.PostgresFacts(160004, False, "UTF8", "on", "on", 0, 0, 97, 5, 1 << 20, 0.0)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, None, ""),
        ({"version": 120000}, Level.PROBLEM, "13 or newer"),
        ({"in_recovery": True}, Level.PROBLEM, "primary"),
        ({"encoding": "LATIN1"}, Level.PROBLEM, "ENCODING 'UTF8'"),
        ({"fsync": "off"}, Level.PROBLEM, "fsync = on"),
        ({"standbys": 2}, Level.WARNING, "synchronous_standby_names"),
        ({"standbys": 2, "sync": 1}, None, ""),
        ({"max_connections": 27}, Level.WARNING, "max_connections"),
        ({"max_connections": 20, "in_use": 12}, Level.PROBLEM, "max_connections"),
    ],
)
def test_what_postgresql_says_is_judged(change: dict[str, Any], level: Level | None, words: str) -> None:
    worse = [one for one in postgres._judged(SOUND._replace(**change), 0) if one.level is not Level.OK]
    assert [(one.level, words in one.todo) for one in worse] == ([] if level is None else [(level, True)])


def test_a_folder_that_cannot_be_written_to() -> None:
    """Not even by root."""
    *_, finding = store._folder(Path("/proc/turnlog.db"))
    assert (finding.area, finding.level) == ("disk", Level.PROBLEM)
    assert finding.what.startswith("/proc cannot be written to")
