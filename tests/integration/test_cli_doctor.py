"""`turnlog doctor` before real engines, a real server and a real PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

from sqlalchemy.engine import make_url

from integration.cli import answer, run
from integration.stand import Stand, until
from ops.simulator.process import SimulatorProcess

Environment = Callable[..., None]


def whats(findings: list[dict[str, Any]], area: str, level: str) -> list[str]:
    return [one["what"] for one in findings if one["area"].startswith(area) and one["level"] == level]


def test_all_is_well_with_a_server_that_runs(stand: Stand, clean_environment: Environment) -> None:
    server = stand.server
    clean_environment(
        **{name.removeprefix("TURNLOG_"): value for name, value in server.environment.items() if "TURNLOG_" in name},
        URL=server.base_url,
    )
    until(lambda: stand.http.get("/ready").status_code == 200)
    findings = answer("doctor")["findings"]
    assert [one for one in findings if one["level"] == "problem"] == []
    assert whats(findings, "server", "ok")[0].startswith(f"{server.base_url} answers")
    assert f"process {server.pid} serves it: a second one would refuse to start" in whats(findings, "database", "ok")
    model, reply = whats(findings, "engine", "ok")
    assert model == "it serves simulator, weight version default"
    assert reply == "sglang: 4 tokens, each with id and logprob, finish length"
    lines = run("doctor", "--no-generate").stdout.splitlines()
    assert lines[-1].endswith("warnings, 0 problems")
    assert not any("4 tokens" in line for line in lines)


def test_the_engines_of_a_running_server_are_those_it_has(stand: Stand, clean_environment: Environment) -> None:
    """Where it is asked from another shell, the server's own settings are not at hand; the server is."""
    clean_environment(DATABASE_URL=stand.url, URL=stand.server.base_url)
    until(lambda: stand.http.get("/ready").status_code == 200)
    findings = answer("doctor")["findings"]
    assert [one["what"] for one in findings if one["level"] == "problem"] == []
    assert whats(findings, f"engine {str(stand.sim.base_url).rstrip('/')}", "ok") == [
        "it serves simulator, weight version default",
        "sglang: 4 tokens, each with id and logprob, finish length",
    ]


def test_an_engine_that_is_not_what_a_turn_needs(
    stand: Stand, tokenizer: str, clean_environment: Environment, sqlite_url: str
) -> None:
    engine = str(stand.sim.base_url)
    wanted = {"DATABASE_URL": sqlite_url, "UPSTREAMS": engine, "REPLAY": "routed_experts,indexer_topk"}
    clean_environment(**wanted, TOKENIZER=tokenizer)
    findings = answer("doctor")["findings"]
    assert whats(findings, "engine", "problem") == []
    assert whats(findings, "engine", "ok")[2:] == [
        "it returns routed_experts, indexer_topk",
        "its prompt ids match those of TURNLOG_TOKENIZER",
    ]
    assert "the junction is derived" in whats(findings, "tokenizer", "ok")[0]
    for fault, words in (
        ("status_500", "it answers a chat with 500"),
        ("not_json", "its reply cannot be recorded as a turn: "),
    ):
        assert stand.sim.post("/sim/faults", json={"fault": fault}).status_code == 200
        [what] = whats(answer("doctor", code=1)["findings"], "engine", "problem")
        assert what.startswith(words)


def test_another_turnlog_is_no_engine(stand: Stand, clean_environment: Environment, sqlite_url: str) -> None:
    other = stand.server.base_url
    clean_environment(DATABASE_URL=sqlite_url, UPSTREAMS=f"{other},{other}/sessions/some")
    whole = whats(answer("doctor", code=1)["findings"], "engine", "problem")
    assert whole == ["this is another Turnlog server, not an engine"] * 2


def test_objects_without_their_setting(clean_environment: Environment, sqlite_url: str) -> None:
    with closing(sqlite3.connect(make_url(sqlite_url).database or "")) as connection, connection:
        connection.execute("INSERT INTO store_meta VALUES ('objects', 's3://old/place')")
        connection.execute("INSERT INTO dead_objects VALUES ('s', 's/1-2.routed_experts.0', 0, NULL)")
    clean_environment(DATABASE_URL=sqlite_url)
    findings = answer("doctor", "--no-generate", code=1)["findings"]
    assert "replay payloads of this store are in s3://old/place" in whats(findings, "database", "warning")


def test_postgresql_is_looked_at(postgres_url: str, sglang: SimulatorProcess, clean_environment: Environment) -> None:
    clean_environment(DATABASE_URL=postgres_url, UPSTREAMS=sglang.base_url)
    findings = answer("doctor", "--no-generate", code=1)["findings"]
    assert whats(findings, "database", "problem") == ["fsync is off: a crash of its machine loses acknowledged turns"]
    fine = whats(findings, "database", "ok")
    assert any(what.startswith("PostgreSQL ") for what in fine)
    assert any("connections: enough for" in what for what in fine)
    assert "no process serves it" in fine
    assert whats(findings, "clock", "ok") == ["this machine's agrees with the database's"]
    missing = make_url(postgres_url).set(database="nowhere").render_as_string(False)
    clean_environment(DATABASE_URL=missing, UPSTREAMS=sglang.base_url)
    [what] = whats(answer("doctor", "--no-generate", code=1)["findings"], "database", "problem")
    assert what.startswith("it cannot be reached: ")
