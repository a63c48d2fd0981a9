"""Settings: one line that names variable, value and what is accepted; secrets hidden."""

from __future__ import annotations

import os

import pytest

from app.errors import StartupError
from app.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TURNLOG_")]:
        monkeypatch.delenv(name)


def test_every_setting_has_a_default_that_works() -> None:
    assert load_settings() == Settings()
    assert Settings().abort_after_s is None


def test_upstreams_are_split_and_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOG_UPSTREAMS", " http://a:1/ ,http://b:2/v1,, ")
    assert load_settings().upstreams == ("http://a:1", "http://b:2")


def test_engines_with_sessions_are_all_or_base_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().engine_sessions == ()
    monkeypatch.setenv("TURNLOG_ENGINE_SESSIONS", " all ")
    assert load_settings().engine_sessions == ("all",)
    monkeypatch.setenv("TURNLOG_ENGINE_SESSIONS", "http://a:1/v1, http://b:2/")
    assert load_settings().engine_sessions == ("http://a:1", "http://b:2")


def test_what_becomes_of_an_aborted_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().abort_policy == "return"
    monkeypatch.setenv("TURNLOG_TOKENIZER", "folder")
    assert load_settings().abort_policy == "continue"
    monkeypatch.setenv("TURNLOG_ON_ABORT", "fail")
    assert load_settings().abort_policy == "fail"


def test_a_binding_may_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().affinity_ttl_s == 3600
    monkeypatch.setenv("TURNLOG_AFFINITY_TTL_S", "off")
    assert load_settings().affinity_ttl_s is None


BAD = [
    ("UPSTREAMS", "a:1"),
    ("UPSTREAMS", "ftp://a"),
    ("UPSTREAMS", "http://a,http://a/"),
    ("UPSTREAMS", "http://a?x=1"),
    ("ENGINE_SESSIONS", "a:1"),
    ("ENGINE_SESSIONS", "all,http://a"),
    ("ENGINE_SESSIONS", "none"),
    ("ENGINE_SESSIONS", "http://a,http://a/v1"),
    ("PLACEMENT", "random"),
    ("AFFINITY_TTL_S", "0"),
    ("AFFINITY_TTL_S", "nan"),
    ("ON_ABORT", "retry"),
    ("UPSTREAM_DIALECT", "tgi"),
    ("UPSTREAM_TIMEOUT_S", "0"),
    ("UPSTREAM_TIMEOUT_S", "nan"),
    ("UPSTREAM_CONNECT_TIMEOUT_S", "soon"),
    ("ROLLBACK_WINDOW", "-1"),
    ("ROLLBACK_WINDOW", "1.5"),
    ("ON_DIVERGENCE", "ignore"),
    ("ON_DIVERGENCE", ""),
    ("CLIENT_REPLY", "short"),
    ("STREAM_KEEPALIVE_S", "-1"),
    ("ON_DISCONNECT", "abort"),
    ("ON_DISCONNECT", "abort_after:"),
    ("MAX_REQUEST_BYTES", "64MiB"),
    ("LEASE_S", "0"),
    ("LEASE_S", "inf"),
    ("DATABASE_URL", "sqlite:///x.db"),
    ("DATABASE_URL", "sqlite+aiosqlite://"),
    ("DATABASE_URL", "nonsense"),
    ("SESSION_PARAMS", "priority,kv_transfer_params"),
    ("MAX_AGENT_SESSIONS", "-1"),
    ("TRUSTED_NETWORKS", "10.0.0.1/8"),
    ("TRUSTED_NETWORKS", "everybody"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"TURNLOG_{name}=")
    assert "accepted is " in line
    shown, wanted = line.split("accepted is ")
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
    ],
)
def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert "sesame" not in str(caught.value)
    assert "same" not in str(caught.value)


SECRETS = {
    "DATABASE_URL": "postgresql+asyncpg://user:sesame-database@host/db",
    "UPSTREAM_API_KEY": "sesame-engines",
    "ADMIN_TOKEN": "sesame-admin-token, sesame-admin-before",
    "SESSION_SECRET": "sesame-session-secret,sesame-secret-before",
}


@pytest.mark.threat("a secret of the settings is shown")
def test_no_secret_is_shown_with_the_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(f"TURNLOG_{name}", value)
    settings = load_settings()
    assert settings.admin_token == ("sesame-admin-token", "sesame-admin-before")
    assert settings.session_secret == ("sesame-session-secret", "sesame-secret-before")
    assert "sesame" not in f"{settings} {settings!r} {caplog.text}"


@pytest.mark.parametrize("name", ["ADMIN_TOKEN", "SESSION_SECRET"])
@pytest.mark.parametrize(
    "value", ["sesame-one,,sesame-two", "sesame-one,", ",", "sesame-one, sesame-one", "sesame\x7f"]
)
def test_a_bad_token_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError, match=f"^TURNLOG_{name}='\\(not shown\\)': accepted is one, or several") as caught:
        load_settings()
    assert "sesame" not in str(caught.value)


def test_a_short_token_is_accepted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TURNLOG_ADMIN_TOKEN", "sesame")
    assert load_settings().admin_token == ("sesame",)
    assert "TURNLOG_ADMIN_TOKEN has fewer than 16 characters" in caplog.text
    assert "sesame" not in caplog.text


@pytest.mark.parametrize("name", ["ADMIN_TOKEN", "SESSION_SECRET", "TRUSTED_NETWORKS"])
def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", " ")
    assert load_settings() == Settings()


def test_networks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOG_TRUSTED_NETWORKS", "10.0.0.0/8, fd00::/8,192.0.2.7")
    assert [str(network) for network in load_settings().trusted_networks] == ["10.0.0.0/8", "fd00::/8", "192.0.2.7/32"]


def test_on_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOG_ON_DISCONNECT", "abort_after:2.5")
    assert load_settings().abort_after_s == 2.5
