"""What a release is made of agrees: one version, the extras that are tried, the forge's files, and what is refused."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.installs import CHECKOUTS, IMPORTED, NEEDED, TRAINERS, reason, table
from ops.server import ROOT
from turnlog.cli.commands import app_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = ["bug.yml", "feature.yml"]


def parsed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def pythons() -> list[str]:
    """The versions that the package says it was tried on."""
    named = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in PROJECT["classifiers"]]
    return [one[1] for one in named if one]


def test_the_version_is_in_one_place() -> None:
    """What must repeat it has the same one; pages and code name no file of one version."""
    assert version("turnlog") == PROJECT["version"]
    base = parsed(ROOT / "ops/deploy/kubernetes/base/kustomization.yaml")
    assert [image["newTag"] for image in base["images"]] == [PROJECT["version"]]
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "ops").rglob("*.*")]
    assert [str(path) for path in files if path.is_file() and re.search(rb"turnlog-\d", path.read_bytes())] == []


def test_every_extra_is_tried_or_of_a_checkout() -> None:
    tried = {*NEEDED, *IMPORTED, *TRAINERS} - {"turnlog", "requirements.lock"}
    assert tried & CHECKOUTS == set()
    assert tried | CHECKOUTS == set(PROJECT["optional-dependencies"])


def test_a_table_of_what_was_tried() -> None:
    cells = {"3.11.7": {"server": "works", "art": "not available"}, "3.12.1": {"server": "works", "art": "resolves"}}
    assert table(cells).splitlines()[2:] == ["| `server` | works | works |", "| `art` | not available | resolves |"]
    said = "× No solution\n  ╰─▶ Because the Python does not satisfy\n Python>=3.12, we can conclude that all is lost."
    assert reason(said) == "the Python does not satisfy Python>=3.12"
    assert reason("something\nelse") == "something else"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with what the first step looks at."""
    (tmp_path / "ops").mkdir()
    for name in ("ops/release", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.0.1] - 2026-01-01\n")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("untracked", "refusal"),
    [(True, "the checkout has changes"), (False, f"CHANGELOG.md has no section ## [{PROJECT['version']}]")],
)
def test_a_release_is_refused(clone: Path, untracked: bool, refusal: str) -> None:
    if untracked:
        (clone / "new").touch()
    run = subprocess.run(["sh", "ops/release"], cwd=clone, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith(f"ops/release: {refusal}")
    assert not (clone / "dist").exists()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_is_there(path: Path) -> None:
    found = parsed(path)
    assert found["permissions"] == {"contents": "read"}
    steps = [step for job in found["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    named = [word for step in steps if "run" in step for word in shlex.split(step["run"]) if "/" in word]
    assert named
    assert [word for word in named if not (ROOT / word).is_file()] == []


def test_the_workflows_are_of_the_pythons_that_the_package_names() -> None:
    check = parsed(FORGE / "workflows/ci.yml")["jobs"]["check"]
    assert check["strategy"]["matrix"]["python"] == pythons()
    steps = parsed(FORGE / "workflows/release.yml")["jobs"]["build"]["steps"]
    [given] = [step["with"]["python-version"] for step in steps if "python-version" in step.get("with", {})]
    assert sorted(given.split()) == pythons()


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_one_and_names_commands_that_there_are(name: str) -> None:
    """By the forge's rules: known types, an id for each that is filled in, and no two alike."""
    form = parsed(FORGE / "ISSUE_TEMPLATE" / name)
    assert form["name"]
    assert form["description"]
    filled = [item for item in form["body"] if item["type"] != "markdown"]
    assert {item["type"] for item in filled} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(item["attributes"]["label"] for item in filled)
    assert len({item["id"] for item in filled}) == len(filled)
    commands = {one.name or one.callback.__name__ for one in app_of().registered_commands if one.callback}
    assert set(re.findall(r"`turnlog (\w+)", (FORGE / "ISSUE_TEMPLATE" / name).read_text())) <= commands


def test_a_report_of_a_bug_has_what_a_maintainer_needs() -> None:
    body = parsed(FORGE / "ISSUE_TEMPLATE/bug.yml")["body"]
    required = {item["id"] for item in body if item.get("validations", {}).get("required")}
    assert required == {"happened", "doctor", "engine"}
    assert "Leave out tokens" in body[0]["attributes"]["value"]
