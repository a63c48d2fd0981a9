"""Where the client finds its server and its token."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turnlog import AsyncTurnlog, Turnlog
from turnlog.client.address import DEFAULT, default_address, default_token


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURNLOG_URL", "TURNLOG_TOKEN", "TURNLOG_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_the_environment_is_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (default_address(), default_token()) == (DEFAULT, None)
    monkeypatch.setenv("TURNLOG_URL", "http://rollouts:8080")
    monkeypatch.setenv("TURNLOG_ADMIN_TOKEN", " new , old")
    assert (default_address(), default_token()) == ("http://rollouts:8080", "new")
    monkeypatch.setenv("TURNLOG_TOKEN", "own")
    assert default_token() == "own"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://a:1/", "http://a:1"),
        ("https://a/turnlog/", "https://a/turnlog"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_an_address_has_no_slash_at_its_end(given: str, found: str) -> None:
    with Turnlog(given) as client:
        assert client.base_url == found


@pytest.mark.parametrize("given", ["localhost:8080", "ftp://a", "http://", "http://a/?b=1", "http://[", "//a"])
def test_what_is_no_address_is_said_at_once(given: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Turnlog(given)
    with pytest.raises(ValueError, match="address"):
        AsyncTurnlog(given)


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="use a token") as caught:
        Turnlog("http://me:secret@a")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["secret\n", "sec ret", "secr\u00e9t", "secret\x00"])
def test_a_token_that_no_header_can_hold_is_refused_at_once_and_not_shown(token: str) -> None:
    """httpx would say which, and it would be tried again as if the server were down."""
    for make in (lambda: Turnlog(token=token), lambda: AsyncTurnlog(token=token)):
        with pytest.raises(ValueError, match="characters") as caught:
            make()
        assert "sec" not in str(caught.value)
    with Turnlog() as client, pytest.raises(ValueError, match="characters"):
        client.attach("s", token).get()


@pytest.mark.parametrize("session_id", ["", "..", "a/b", "a b", "ü", "a" * 129, "a\n"])
def test_an_id_that_none_can_have_is_refused(session_id: str) -> None:
    with Turnlog() as client, pytest.raises(ValueError, match="session's id"):
        client.attach(session_id)


def test_the_package_loads_neither_httpx_nor_numpy_by_itself() -> None:
    code = "import sys, turnlog; sys.exit(any(name in sys.modules for name in ('httpx', 'numpy', 'app')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("from turnlog import fetch_payload; fetch_payload({})", "fetch_payload()"),
        ("from turnlog.client.samples import parse; parse(bytes(8))", "session.samples()"),
        ("from turnlog.client.columns import to_npy; to_npy([1])", "a column"),
    ],
)
def test_a_client_without_numpy_says_what_needs_it(call: str, named: str) -> None:
    """All else of the client is there."""
    code = f"import sys; sys.modules['numpy'] = None\nfrom turnlog import AsyncTurnlog, Turnlog\n{call}"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.stderr.endswith(f"ImportError: {named} needs the package numpy: pip install numpy\n")
