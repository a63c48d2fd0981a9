"""What the extras of the package hold, and how one is told to get them."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.extras import install_command
from ops.server import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed(extra: str) -> list[Requirement]:
    """An extra's packages, with those of the extras that it names, but for the service's own."""
    found: list[Requirement] = []
    for one in map(Requirement, PROJECT["optional-dependencies"][extra]):
        found += [more for name in sorted(one.extras) for more in needed(name)] if one.name == "turnlog" else [one]
    return found


@pytest.mark.parametrize("extra", ["tito", "bench"])
def test_the_advice_names_the_packages_themselves(extra: str) -> None:
    """Under the name turnlog nothing is published. The extra is that of the installed version."""
    pip, verb, *packages = shlex.split(install_command(extra))
    assert (pip, verb) == ("pip", "install")
    told = {(canonicalize_name(one.name), str(one.specifier)) for one in map(Requirement, packages)}
    wanted = {(canonicalize_name(one.name), str(one.specifier)) for one in needed(extra)}
    assert told
    assert told <= wanted
    assert extra != "tito" or told == wanted


def test_nobody_is_told_to_install_what_is_not_published() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    code = [path for room in ("app", "turnlog", "ops", "workers") for path in (ROOT / room).rglob("*.py")]
    wrong = re.compile(r"pip install (?!--find-links)[^\n]*turnlog\[[^\n\]]*\](?! @ )")
    assert [str(path) for path in (*pages, *code) if wrong.search(Path(path).read_text())] == []
