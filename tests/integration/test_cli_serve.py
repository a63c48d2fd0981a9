"""`turnlog serve`: a server from nothing, how it says where it is, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from integration.cli import complaint, started
from integration.stand import until
from ops.server import is_healthy, reserve_port

PATIENCE_S = 60


class Owner:
    """Keeps a port reserved."""


def test_it_makes_its_store_serves_and_ends(tmp_path: Path) -> None:
    owner = Owner()
    port = reserve_port(owner)
    token = "a-token-of-the-test-0123456789"
    (tmp_path / "turnlog.toml").write_text(f'admin_token = "{token}"\n')
    (tmp_path / "variables").write_text("# of this host\nexport TURNLOG_LOG_FORMAT='json'\nTURNLOG_ADMIN_TOKEN=\n")
    files = ("--config", "turnlog.toml", "--env-file", "variables")
    process = started("serve", "--port", port, *files, folder=tmp_path)
    try:
        until(lambda: is_healthy(port), PATIENCE_S)
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/engines").status_code == 401
        assert httpx.get(f"{url}/engines", headers={"authorization": f"Bearer {token}"}).status_code == 200
        assert httpx.get(f"{url}/ui").status_code == 200
        process.terminate()
        said, complaints = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM)
    assert (tmp_path / "var" / "turnlog.db").stat().st_mode & 0o777 == 0o600
    assert said == ""
    assert f"turnlog: {url}, the page at {url}/ui\n" in complaints
    assert "sign in with the first token of TURNLOG_ADMIN_TOKEN" in complaints
    assert token not in complaints
    assert "Traceback" not in complaints


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"TURNLOG_DATABASE_URL": "mysql://x:canary@y/z"}, "turnlog: TURNLOG_DATABASE_URL="),
        ({"TURNLOG_WORKERS": "many"}, "turnlog: TURNLOG_WORKERS='many'"),
    ],
)
def test_a_wrong_setting_ends_it_with_one_line(tmp_path: Path, given: dict[str, str], said: str) -> None:
    process = started("serve", "--port", "0", folder=tmp_path, environment=given)
    _, complaints = process.communicate(timeout=PATIENCE_S)
    [line] = complaints.splitlines()
    assert process.returncode == 1
    assert line.startswith(said)
    assert "canary" not in line
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path, clean_environment: Callable[..., None]) -> None:
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{tmp_path / 'turnlog.db'}")
    assert "SQLite is for one API process" in complaint("serve", "--workers", "2", code=2)
    (tmp_path / "variables").write_text("TURNLOG_LOG_LEVEL=info\nTURNLOG_ADMIN_TOKEN canary\n")
    assert complaint("serve", "--env-file", tmp_path / "variables", code=2).endswith("variables:2: not NAME=value")
    assert "No such file" in complaint("migrate", "--env-file", tmp_path / "none", code=2)
    (tmp_path / "variables").unlink()
    assert list(tmp_path.iterdir()) == []
