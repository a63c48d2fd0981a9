"""Settings: one line that names variable, value and what is accepted; secrets hidden."""

from __future__ import annotations

import os

import pytest

from app.errors import StartupError
from app.settings import LATER, Settings, load_settings


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


BAD = [
    ("UPSTREAMS", "a:1"),
    ("UPSTREAMS", "ftp://a"),
    ("UPSTREAMS", "http://a,http://a/"),
    ("UPSTREAMS", "http://a?x=1"),
    ("UPSTREAM_DIALECT", "tgi"),
    ("UPSTREAM_TIMEOUT_S", "0"),
    ("UPSTREAM_TIMEOUT_S", "nan"),
    ("UPSTREAM_CONNECT_TIMEOUT_S", "soon"),
    ("ROLLBACK_WINDOW", "-1"),
    ("ROLLBACK_WINDOW", "1.5"),
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
    ],
)
def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TURNLOG_{name}", value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert "sesame" not in str(caught.value)
    assert "same" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(LATER))
def test_what_is_not_built_yet_is_refused_rather_than_ignored(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "sesame")
    with pytest.raises(StartupError, match=name) as caught:
        load_settings()
    assert "sesame" not in str(caught.value)


def test_on_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOG_ON_DISCONNECT", "abort_after:2.5")
    assert load_settings().abort_after_s == 2.5
