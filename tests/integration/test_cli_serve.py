"""`turnlog serve`: a server from nothing, how it says where it is, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import httpx

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
    process = started("serve", "--port", port, folder=tmp_path, environment={"TURNLOG_ADMIN_TOKEN": token})
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


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path, clean_environment: Callable[..., None]) -> None:
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{tmp_path / 'turnlog.db'}")
    assert "SQLite is for one API process" in complaint("serve", "--workers", "2", code=2)
    clean_environment(DATABASE_URL="mysql://x:canary@y/z")
    line = complaint("serve")
    assert line.startswith("turnlog: TURNLOG_DATABASE_URL=")
    assert "canary" not in line
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{tmp_path / 'turnlog.db'}", WORKERS="many")
    assert complaint("serve").startswith("turnlog: TURNLOG_WORKERS='many'")
    assert list(tmp_path.iterdir()) == []
