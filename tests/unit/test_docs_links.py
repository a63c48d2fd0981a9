"""What the pages name exists: files, anchors, settings, commands."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import app
from app.settings import Settings
from ops.guides import ENGINE
from turnlog.client.address import DEFAULT

ROOT = Path(app.__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

ELSEWHERE = frozenset(
    {
        *("TURNLOG_URL", "TURNLOG_TOKEN", "TURNLOG_RUN", "TURNLOG_CONFIG", "TURNLOG_CRASH_POINT"),
        *("TURNLOG_HOME", "TURNLOG_PORT", "TURNLOG_POSTGRES_PORT"),
        *("TURNLOG_TEST_LANES", "TURNLOG_PAGE_SCREENSHOTS"),
        *("TURNLOG_AGENT", "TURNLOG_ROLLOUT", "TURNLOG_SESSION_ID"),
    }
)
"""Variables that are not settings: those of client, command line, agents and batch scripts, the file of settings, and
the tests'."""

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_VARIABLE = re.compile(r"\bTURNLOG_[A-Z0-9_]+\b")
_LOOPBACK = re.compile(r"\b(?:127\.0\.0\.1|localhost):(\d+)")
_MODULE = re.compile(r"python -m ((?:ops|app|turnlog)[\w.]*)")


@cache
def prose(path: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", path.read_text())


@cache
def anchors(path: Path) -> frozenset[str]:
    """As GitHub makes them: lower case, punctuation left out, spaces as hyphens, a repeated one numbered."""
    found: list[str] = []
    for heading in _HEADING.findall(prose(path)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def settings() -> set[str]:
    return {f"TURNLOG_{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    lost = []
    for link in _LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_variables_and_commands_exist(path: Path) -> None:
    text = path.read_text()
    unknown = sorted(set(_VARIABLE.findall(text)) - settings() - ELSEWHERE)
    assert [name for name in unknown if not name.endswith("_")] == []
    assert [name for name in set(_MODULE.findall(text)) if importlib.util.find_spec(name.rstrip(".")) is None] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_server_is_where_the_client_looks_for_it(path: Path) -> None:
    """And uvicorn, which has the same default."""
    text = path.read_text()
    assert set(_LOOPBACK.findall(text)) <= {address.rpartition(":")[2] for address in (DEFAULT, ENGINE)}
    assert not re.search(r"uvicorn app\.main:app.*--port", text)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    guides = (ROOT / "docs" / "guides" / "README.md").read_text()
    docs = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in docs if f"({name}" not in index] == []
    inner = [path.name for path in (ROOT / "docs" / "guides").glob("*.md") if path.name != "README.md"]
    assert [name for name in inner if f"({name}" not in guides] == []


_RULE = re.compile(r"^\| .+ \| \[`[^`]+`\]\(\.\./([^)]+)\) \| `([^`]+)` \|$", re.MULTILINE)


def test_a_rule_of_the_contract_is_found_where_the_architecture_says() -> None:
    rules = _RULE.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(rules) == 30
    files = [file for room in ("app", "workers") for file in (ROOT / room).rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    for file, search in rules:
        assert [name for name, text in texts.items() if search in text] == [file], search
