"""What a start imports, and above all what it does not: each of these costs time in which nobody is served."""

from __future__ import annotations

import subprocess
import sys

from ops.server import ROOT

FIRST_USED_LATER = {
    "alembic": "a migration",
    "app.export.containers.parquet": "an export",
    "app.export.formats": "an export",
    "app.api.openapi": "the document",
    "app.export.exporter": "an export",
    "app.api.page.page": "the page",
    "jinja2": "a tokenizer",
    "pyarrow": "an export",
    "pygments": "a terminal",
    "rich": "a terminal",
    "sqlalchemy.orm": "nothing, as long as all is well",
    "structlog": "a terminal",
    "tokenizers": "a tokenizer",
    "transformers": "a tokenizer",
    "typer": "the command line",
}


def imported(by: str) -> set[str]:
    """The modules that are there after these lines, in a process of their own."""
    script = f"{by}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_a_start_imports_what_it_needs_and_no_more() -> None:
    assert not imported("import app.main") & set(FIRST_USED_LATER)


def test_the_engine_without_the_orm_is_the_one_with_it() -> None:
    """In either order: whoever wants the ORM gets all of it."""
    same = "assert asynchronous.AsyncEngine is async_engine.AsyncEngine and asynchronous.AsyncSession"
    ours, theirs = "from app.store import async_engine", "from sqlalchemy.ext import asyncio as asynchronous"
    for first, second in ((ours, theirs), (theirs, ours)):
        assert "sqlalchemy.orm" in imported(f"{first}\n{second}\n{same}")


def test_the_keeper_needs_the_standard_library_alone() -> None:
    found = {name.partition(".")[0] for name in imported("import turnlog.keeper.__main__")}
    foreign = found - sys.stdlib_module_names - {"turnlog", "__main__"}
    assert not {name for name in foreign if not name.startswith(("_", "sitecustomize"))}
