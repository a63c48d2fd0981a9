"""What `ops/deploy` ships: a lock that is whole, an image and units that fit the command line and each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.answering import Answer, Answering
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from app.services import DRAIN_S
from app.settings import PREFIX, Settings
from turnlog.cli.commands import app_of
from turnlog.cli.serve import STOP_S
from turnlog.supervisor import BACKLOG

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "ops" / "deploy"
LOCKS = ("requirements.lock", "build.lock")
SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields}


def locked(name: str) -> dict[str, tuple[Version, int]]:
    """Each package's version, and how many hashes it has."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (DEPLOY / name).read_text()):
        if entry and not entry.startswith("#"):
            pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", entry)
            assert pin is not None, entry
            found[canonicalize_name(pin[1])] = Version(pin[2]), len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry))
    return found


def needed() -> list[Requirement]:
    """What the server needs, with a tokenizer and Parquet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][extra] for extra in ("server", "parquet", "tito")]
    return [Requirement(line) for lines in (project["dependencies"], *extras) for line in lines]


def closure(requirements: list[Requirement]) -> dict[str, list[Requirement]]:
    """Everything that is needed here, by what is installed, and who needs which versions."""
    found: dict[str, list[Requirement]] = {}
    todo = list(requirements)
    seen: set[tuple[str, str]] = set()
    while todo:
        one = todo.pop()
        if not any(one.marker is None or one.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
            continue
        name = canonicalize_name(one.name)
        found.setdefault(name, []).append(one)
        for extra in ("", *one.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += [
                    inner
                    for line in distribution(name).requires or []
                    if (inner := Requirement(line)).marker is None or inner.marker.evaluate({"extra": extra})
                ]
    return found


def test_the_lock_holds_all_that_is_needed_in_versions_that_are_allowed() -> None:
    pytest.importorskip("transformers")
    pinned = locked("requirements.lock")
    direct = needed()
    for one in direct:
        assert one.specifier.contains(pinned[canonicalize_name(one.name)][0]), one
    missing = [name for name in closure(direct) if name not in pinned]
    assert missing == []


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_hashes_and_no_index(name: str) -> None:
    assert all(hashes for _, hashes in locked(name).values())
    assert not re.search(r"https?://|--(extra-)?index-url|file:", (DEPLOY / name).read_text())


def test_what_builds_the_wheel_is_locked() -> None:
    backend = [
        Requirement(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    ]
    pinned = locked("build.lock")
    assert all(one.specifier.contains(pinned[canonicalize_name(one.name)][0]) for one in backend)


class Instruction(tuple[str, str]):
    """A Dockerfile's line: its word, and what follows."""


def instructions() -> Iterator[Instruction]:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text()))
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        yield Instruction((word, rest.strip()))


def last(word: str) -> str:
    return [rest for found, rest in instructions() if found == word][-1]


def test_the_image_copies_what_is_there_and_runs_as_nobody_in_particular() -> None:
    stages = [rest for word, rest in instructions() if word == "FROM"]
    assert stages == ["${PYTHON} AS build", "${PYTHON}"]
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert f"!{source.split('/')[0]}" in allowed
    uid, gid = last("USER").split(":")
    assert int(uid) > 0
    assert int(gid) > 0
    assert last("STOPSIGNAL") == "SIGTERM"
    assert "PYTHONUNBUFFERED=1" in last("ENV")
    assert shlex.split(last("VOLUME")) == shlex.split(last("WORKDIR"))


def run_command(words: list[str]) -> None:
    """A command line that the image or the unit starts is one that there is."""
    command, *options = words
    found = {one.name or one.callback.__name__: one.callback for one in app_of().registered_commands if one.callback}
    accepted = set(found[command].__annotations__)
    for option in options:
        if option.startswith("--"):
            assert option[2:].removeprefix("no-").replace("-", "_") in accepted, option


def listed(text: str) -> list[str]:
    value = yaml.safe_load(text)
    assert isinstance(value, list)
    return [str(one) for one in value]


def test_the_image_starts_what_there_is() -> None:
    assert listed(last("ENTRYPOINT")) == ["turnlog"]
    run_command(listed(last("CMD")))


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_tells_a_server_that_answers(status: int, code: int) -> None:
    check = listed(last("HEALTHCHECK").partition("CMD ")[2])
    assert check[0] == "python"
    with Answering(lambda asked: Answer(status=status if asked.path == "/health" else 404)) as server:
        code_text = check[2].replace("8000", str(server.server_port))
        assert subprocess.run([sys.executable, "-I", check[1], code_text], timeout=60, check=False).returncode == code


def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_the_composition_waits_for_what_it_needs_and_wants_its_secrets() -> None:
    services = composed()["services"]
    for service in ("api", "migrate"):
        environment = services[service]["environment"]
        assert set(environment) <= SETTINGS
        # The composition's own folder is where a relative path begins; every setting of the file reaches the server.
        assert (DEPLOY / services[service]["env_file"]).resolve() == ROOT / "turnlog.env"
        assert environment["TURNLOG_ADMIN_TOKEN"].startswith("${TURNLOG_ADMIN_TOKEN:?")
        assert "${POSTGRES_PASSWORD:?" in environment["TURNLOG_DATABASE_URL"]
        run_command([re.sub(r"\$\{.*:-(\d+)\}", r"\1", word) for word in services[service]["command"]])
        assert services[service]["read_only"] is True
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert services["api"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert "--no-migrate" in services["api"]["command"]
    assert all(port.startswith("127.0.0.1:") for port in services["api"]["ports"])
    context = (DEPLOY / services["api"]["build"]["context"]).resolve()
    assert (context / services["api"]["build"]["dockerfile"]).is_file()


def unit(file: str = "turnlog.service") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / file).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_whoever_stops_it_waits_longer_than_it_does() -> None:
    most = STOP_S + DRAIN_S
    assert int(unit()["TimeoutStopSec"][0]) > most
    assert int(composed()["services"]["api"]["stop_grace_period"].removesuffix("s")) > most


def test_the_unit_starts_what_there_is_with_settings_that_there_are() -> None:
    program, *words = shlex.split(unit()["ExecStart"][0])
    assert program.endswith("/turnlog")
    run_command(words)
    named = {line.partition("=")[0] for line in unit()["Environment"] if line.startswith(PREFIX)}
    assert named <= SETTINGS


def test_the_socket_is_where_the_service_would_listen() -> None:
    _, *words = shlex.split(unit()["ExecStart"][0])
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert unit("turnlog.socket")["ListenStream"] == [f"{options['--host']}:{options['--port']}"]
    assert unit("turnlog.socket")["Backlog"] == [str(BACKLOG)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that is there; what it says otherwise would be a warning or an unknown setting."""
    text = (DEPLOY / "turnlog.service").read_text().replace("/opt/turnlog/bin/turnlog", shutil.which("true") or "")
    file = tmp_path / "turnlog.service"
    file.write_text(text)
    shutil.copy(DEPLOY / "turnlog.socket", tmp_path)
    files = [str(file), str(tmp_path / "turnlog.socket")]
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    scored = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert scored.returncode == 0, scored.stdout[-300:]


@pytest.mark.untimed
def test_the_lock_can_be_installed(tmp_path: Path) -> None:
    """The index has each pinned file, with its hash."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--dry-run"]
    command += ["--ignore-installed", "--require-hashes", "--no-deps", "-r", str(DEPLOY / "requirements.lock")]
    subprocess.run(command, check=True, timeout=600, cwd=tmp_path)
