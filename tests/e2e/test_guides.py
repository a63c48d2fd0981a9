"""The examples of README and client, the pages under docs/guides, run as they stand; and the first five minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integration.stand import Stand

from ops import guides
from ops.server import ROOT, reserve_port

pytestmark = pytest.mark.long

GUIDES = sorted(path for path in (ROOT / "docs" / "guides").glob("*.md") if guides.script(path.read_text()))
PAGES = (ROOT / "README.md", ROOT / "docs" / "client.md", *GUIDES)

QUICKSTART_S = 240


def page(path: Path) -> object:
    marks = [pytest.mark.harness] if guides.needs(path.read_text()) else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [page(path) for path in PAGES])
def test_a_page_runs(path: Path, stand: Stand) -> None:
    """Its assertions are the page's own."""
    absent = guides.missing(path.read_text())
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed")
    if guides.is_killed(path.read_text()):
        assert guides.main([str(path)]) == 0  # on a server of its own
        return
    try:
        printed = guides.run(path, stand.server.base_url, str(stand.sim.base_url).rstrip("/"))
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{error.output}\n{error.stderr}")
    assert printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["docs/nope.md"], "docs/nope.md does not exist"),
        (["docs/guides/agents.md", "--python", "/no/python"], "--python: /no/python does not exist"),
        (
            ["docs/guides/claude-code-grpo.md"],
            "docs/guides/claude-code-grpo.md needs packages or programs that are missing: ",
        ),
    ],
)
def test_what_is_not_there_is_told_in_a_line(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    found = guides.shutil.which
    monkeypatch.setattr(guides.shutil, "which", lambda name: None if name == "claude" else found(name))
    with pytest.raises(SystemExit) as ended:
        guides.main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


class Owner:
    """Holds the ports while it lives."""


@pytest.mark.untimed
def test_the_first_five_minutes(tmp_path: Path) -> None:
    """All blocks of the page but the installation, in one shell."""
    owner = Owner()
    text = (ROOT / "docs" / "quickstart.md").read_text()
    install, *blocks = guides.blocks(text)
    assert install == ("sh", "sh ops/setup demo\n. .venv/bin/activate\n")
    steps = [text if language == "sh" else f"python - <<'PAGE'\n{text}PAGE\n" for language, text in blocks]
    script = "set -e\n" + "".join(steps)
    port = reserve_port(owner)
    script = script.replace("turnlog serve", f"turnlog serve --port {port}")
    script = script.replace(guides.ENGINE.rpartition(":")[2], str(reserve_port(owner)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), inherited["PATH"]))
    environment = {**inherited, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    environment["TURNLOG_URL"] = f"http://127.0.0.1:{port}"
    log = tmp_path / "printed"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = shell.wait(QUICKSTART_S)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    printed = log.read_text()
    assert code == 0, printed
    assert [line for line in printed.splitlines() if line.endswith("is committed")] == [
        f"turn {number} is committed" for number in (1, 2, 3, 4)
    ]
    assert printed.count("Started server process") == 2, printed
    assert "0 problems" in printed
    assert (tmp_path / "rows.ndjson").read_text().count("\n") == 2
