"""Settings: one line that names variable, value and what is accepted; secrets hidden."""

from __future__ import annotations

import os
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from tables import rows

from app.crash_points import VARIABLE
from app.errors import StartupError
from app.settings import CLIENT_VARIABLES, PREFIX, Settings, can_be_off, load_settings, read_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TURNLOG_")]:
        monkeypatch.delenv(name)


def test_every_setting_has_a_default_that_works() -> None:
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("given", "name", "read"),
    [
        ({}, "abort_after_s", None),
        ({"ON_DISCONNECT": "abort_after:2.5"}, "abort_after_s", 2.5),
        ({"UPSTREAMS": " http://a:1/ ,http://b:2/v1,, "}, "upstreams", ("http://a:1", "http://b:2")),
        ({}, "engine_sessions", ()),
        ({"ENGINE_SESSIONS": " all "}, "engine_sessions", ("all",)),
        ({"ENGINE_SESSIONS": "http://a:1/v1, http://b:2/"}, "engine_sessions", ("http://a:1", "http://b:2")),
        ({}, "abort_policy", "return"),
        ({"TOKENIZER": "folder"}, "abort_policy", "continue"),
        ({"TOKENIZER": "folder", "ON_ABORT": "fail"}, "abort_policy", "fail"),
        ({}, "affinity_ttl_s", 3600),
        ({"AFFINITY_TTL_S": "off"}, "affinity_ttl_s", None),
        (
            {"TRUSTED_NETWORKS": "10.0.0.0/8, fd00::/8,192.0.2.7"},
            "trusted_networks",
            (ip_network("10.0.0.0/8"), ip_network("fd00::/8"), ip_network("192.0.2.7/32")),
        ),
    ],
)
def test_what_is_read_of_a_value(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], name: str, read: Any) -> None:
    for variable, value in given.items():
        monkeypatch.setenv(PREFIX + variable, value)
    assert getattr(load_settings(), name) == read


BAD = rows("settings_refused")


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"TURNLOG_{name}=")
    assert "expected " in line
    shown, wanted = line.split("expected ")
    assert value.strip("/").split(",")[0] in shown
    assert wanted.strip()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "mysql://user:sesame@host/db"),
        ("DATABASE_URL", "postgresql://user:sesame@host:port/db"),
        ("DATABASE_URL", "postgresql+psycopg://user:se:s@same@host/db"),
        ("UPSTREAMS", "http://user:sesame@host"),
        ("ENGINE_SESSIONS", "http://user:sesame@host"),
        ("DATABASE_URL", "postgresql://host/db?user=me&password=sesame"),
        ("DATABASE_URL", "postgresql+asyncpg://host/db?sslpassword=sesame&channel_binding=require"),
    ],
)
def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert "sesame" not in str(caught.value)
    assert "same" not in str(caught.value)


@pytest.mark.parametrize(("value", "told"), rows("settings_text_upstreams"))
def test_wrong_upstreams_of_text_are_one_line(monkeypatch: pytest.MonkeyPatch, value: str, told: str) -> None:
    monkeypatch.setenv("TURNLOG_TEXT_UPSTREAMS", value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    [line] = str(caught.value).splitlines()
    assert line.startswith("TURNLOG_TEXT_UPSTREAMS='(not shown)': expected JSON such as {")
    assert told in line
    assert "sesame" not in line


def test_upstreams_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_A", "sesame\n")
    given = '{"a": {"url": "https://api.example.com/v1beta/openai/", "key_env": "KEY_OF_A"}, "b": "http://b:1"}'
    monkeypatch.setenv("TURNLOG_TEXT_UPSTREAMS", given)
    assert [tuple(upstream) for upstream in load_settings().text_upstreams] == [
        ("a", "https://api.example.com/v1beta/openai", "sesame", None),
        ("b", "http://b:1/v1", None, None),
    ]
    assert Settings(features=(), text_upstreams=given).text_upstreams == ()


SECRETS = {
    "TEXT_UPSTREAMS": '{"judge": {"url": "http://judge", "key": "sesame-of-a-vendor"}}',
    "DATABASE_URL": "postgresql+asyncpg://user:sesame-database@host/db",
    "UPSTREAM_API_KEY": "sesame-engines",
    "ADMIN_TOKEN": "sesame-admin-token, sesame-admin-before",
    "SESSION_SECRET": "sesame-session-secret,sesame-secret-before",
}


@pytest.mark.threat("secret shown with the settings")
def test_no_secret_is_shown_with_the_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(f"TURNLOG_{name}", value)
    settings = load_settings()
    assert settings.admin_token == ("sesame-admin-token", "sesame-admin-before")
    assert settings.session_secret == ("sesame-session-secret", "sesame-secret-before")
    assert settings.text_upstreams[0].key == "sesame-of-a-vendor"
    assert "sesame" not in f"{settings} {settings!r} {settings.text_upstreams!r} {caplog.text}"


@pytest.mark.parametrize("name", ["ADMIN_TOKEN", "SESSION_SECRET"])
@pytest.mark.parametrize(
    "value", ["sesame-one,,sesame-two", "sesame-one,", ",", "sesame-one, sesame-one", "sesame\x7f"]
)
def test_a_bad_token_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError, match=f"^TURNLOG_{name}='\\(not shown\\)': expected one or several") as caught:
        load_settings()
    assert "sesame" not in str(caught.value)


def test_a_short_token_is_accepted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TURNLOG_ADMIN_TOKEN", "sesame")
    assert load_settings().admin_token == ("sesame",)
    assert "TURNLOG_ADMIN_TOKEN has fewer than 16 characters" in caplog.text
    assert "sesame" not in caplog.text


@pytest.mark.parametrize("value", ["", " ", "\t"])
@pytest.mark.parametrize(
    "variable", [*(PREFIX + name.upper() for name in Settings.model_fields), VARIABLE, "TURNLOG_UPSTREAM", "TURNLOG_X"]
)
def test_an_empty_variable_is_not_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert load_settings() == Settings()
    assert caplog.text == ""


SIZES = sorted(name for name in Settings.model_fields if name.endswith("_bytes"))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("value", "bytes_"), rows("settings_sizes"))
def test_a_size_may_have_a_unit(monkeypatch: pytest.MonkeyPatch, name: str, value: str, bytes_: int) -> None:
    monkeypatch.setenv(PREFIX + name.upper(), value)
    assert getattr(load_settings(), name) == bytes_


def test_off_is_for_limits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, field in Settings.model_fields.items():
        variable = PREFIX + name.upper()
        monkeypatch.setenv(variable, "off")
        settings, _ = read_settings()
        assert (settings is not None and getattr(settings, name) is None) == can_be_off(field)
        monkeypatch.delenv(variable)


def test_all_mistakes_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"WORKERS": "many", "LEASE_S": "0", "REPLAY": "experts,index", "MOE_TOPK": "8", "TOKENIZER": "folder"}
    given |= {"UPSTREAM_DIALECT": "vllm", "ADMIN_TOKEN": "sesame,,", "CRASH_POINT": "nowhere"}
    given |= {"DATABSE_URL": "postgresql+asyncpg://user:sesame@host/db"}
    for name, value in given.items():
        monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    lines = caught.value.lines
    beginnings = (
        "TURNLOG_DATABSE_URL is not a setting: did you mean TURNLOG_DATABASE_URL?",
        "TURNLOG_CRASH_POINT='nowhere': expected ",
        "TURNLOG_REPLAY='experts,index': expected ",
        "set both TURNLOG_MOE_LAYERS and TURNLOG_MOE_TOPK, or neither",
        "TURNLOG_WORKERS='many': expected ",
        "TURNLOG_LEASE_S='0': expected ",
        "TURNLOG_ADMIN_TOKEN='(not shown)': expected ",
    )
    assert len(lines) == len(beginnings)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True))
    assert "sesame" not in str(caught.value)
    assert caught.value.under("turnlog").splitlines() == [f"turnlog: {line}" for line in lines]


def test_a_mistake_elsewhere_is_not_in_the_way_of_who_needs_few(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Settings(lease_s=9)
    given = {"WORKERS": "many", "UPSTREAM": "http://a", "X": "y", "CRASH_POINT": "z", "LEASE_S": "9"}
    for name, value in given.items():
        monkeypatch.setenv(f"TURNLOG_{name}", value)
    assert load_settings("database_url", "lease_s") == wanted
    assert caplog.text == ""
    monkeypatch.setenv("TURNLOG_DATABSE_URL", "sqlite+aiosqlite:///other.db")
    with pytest.raises(StartupError, match="did you mean TURNLOG_DATABASE_URL"):
        load_settings("database_url")


MISSPELT = {
    "UPSTREMS": "UPSTREAMS",
    "TOKENISER": "TOKENIZER",
    "WORKER": "WORKERS",
    "URLS": "URL",
    "UPSTREAM__API_KEY": "UPSTREAM_API_KEY",
    "MOE_TOP_K": "MOE_TOPK",
    "MAX_REQUESTS_BYTES": "MAX_REQUEST_BYTES",
}
NEAREST = dict.fromkeys(("HOST", "IMAGE", "DATA_DIR")) | {
    "UI_TOKEN": "TOKEN",
    "UPSTREAM_URL": "UPSTREAMS",
    "ADMIN_TOKEN_FILE": "ADMIN_TOKEN",
}


@pytest.mark.parametrize("name", [*MISSPELT, *NEAREST])
def test_a_misspelt_name_is_refused_and_an_unknown_one_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", "sesame")
    if name in MISSPELT:
        with pytest.raises(StartupError) as caught:
            load_settings()
        assert str(caught.value) == f"TURNLOG_{name} is not a setting: did you mean TURNLOG_{MISSPELT[name]}?"
        return
    assert load_settings() == Settings()
    hint = "" if NEAREST[name] is None else f"; the nearest is TURNLOG_{NEAREST[name]}"
    assert caplog.messages == [f"TURNLOG_{name} is not a setting of this version and is ignored{hint}"]


@pytest.mark.parametrize("service", ["turnlog", "turnlog-upstream", "turnlog-workers", "turnlog-url", "turnlog-db-1"])
def test_what_a_cluster_injects_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, service: str
) -> None:
    """What a pod of Kubernetes gets for each service of its namespace."""
    name, address = service.upper().replace("-", "_"), "10.0.0.1:8000"
    injected = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "8000", "SERVICE_PORT_HTTP": "8000"}
    injected |= {"PORT": f"tcp://{address}", "PORT_8000_TCP": f"tcp://{address}", "PORT_8000_UDP": f"udp://{address}"}
    injected |= {"PORT_8000_TCP_PROTO": "tcp", "PORT_8000_TCP_PORT": "8000", "PORT_8000_TCP_ADDR": "10.0.0.1"}
    for variable, value in injected.items():
        monkeypatch.setenv(f"{name}_{variable}", value)
    assert load_settings() == Settings()
    assert caplog.text == ""


def test_no_setting_looks_like_what_a_cluster_injects() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields} | CLIENT_VARIABLES
    assert not [name for name in known if "_PORT" in name or "_SERVICE_" in name]


def test_a_file_holds_settings_and_a_variable_takes_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "turnlog.toml"
    monkeypatch.setenv("TURNLOG_CONFIG", str(file))
    file.write_text(
        'upstreams = ["http://a:1/", "http://b:2/v1"]\nadmin_token = ["one-of-sixteen-chars", "two"]\n'
        'rollback_window = 3\nmax_replay_bytes = "2GiB"\nreplay_incremental = true\nclosed_ttl_s = "off"\n'
        'history = "tree"\n[limits]\nturns = 5\n'
    )
    monkeypatch.setenv("TURNLOG_HISTORY", "linear")
    monkeypatch.setenv("TURNLOG_ROLLBACK_WINDOW", " ")  # counts as not set
    settings = load_settings()
    assert (settings.upstreams, settings.admin_token) == (
        ("http://a:1", "http://b:2"),
        ("one-of-sixteen-chars", "two"),
    )
    assert (settings.rollback_window, settings.max_replay_bytes, settings.history) == (3, 2 << 30, "linear")
    assert settings.limits is not None
    assert (settings.replay_incremental, settings.limits.turns) == (True, 5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\nlease_s = 0\n", ":2: lease_s='0': expected"),
        ("# x\n\ndatabse_url = 'x'\n", ":3: databse_url is not a setting: did you mean database_url?"),
        ("TURNLOG_HISTORY = 'tree'\n", ":1: TURNLOG_HISTORY is not a setting: did you mean history?"),
        ("[limits]\nodd = 1\n", ":1: limits="),
        ("history = \n", ": Invalid value (at line 1, column 11)"),
        ("lease_s = 1979-05-27\n", ": expected text, a number, true or false, a list or a table"),
        ('admin_token = ["sec ret", ""]\n', ":1: admin_token='(not shown)': expected"),
        ('database_url = "mysql://user:sec@host/db"\n', ":1: database_url='mysql://user:***@host/db': expected"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "turnlog.toml"
    file.write_text(text)
    monkeypatch.setenv("TURNLOG_CONFIG", str(file))
    with pytest.raises(StartupError) as refused:
        load_settings()
    [line] = refused.value.lines
    assert line.startswith(f"{file}{told}")
    assert "sec" not in line.removeprefix(str(file))
    monkeypatch.setenv("TURNLOG_CONFIG", str(tmp_path / "none"))
    with pytest.raises(StartupError, match="No such file"):
        load_settings()
