"""What a start must not import."""

from __future__ import annotations

import subprocess
import sys

import grimp

from ops.server import ROOT

EXTRAS = {
    *(
        "alembic",
        "boto3",
        "jinja2",
        "opentelemetry.sdk",
        "pyarrow",
        "rich",
        "sqlalchemy.orm",
        "tokenizers",
        "transformers",
    ),
    "typer",
}
"""Packages that a server may lack, or that take long to import."""


def imported(by: str) -> set[str]:
    """The modules that are there after these lines, in a process of their own."""
    script = f"{by}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_a_start_needs_no_extra() -> None:
    assert not imported("import app.main") & EXTRAS


def test_the_supervisor_needs_the_standard_library_alone() -> None:
    names = {name.partition(".")[0] for name in imported("import turnlog.supervisor")}
    foreign = names - sys.stdlib_module_names - {"turnlog", "__main__"}
    assert not {name for name in foreign if not name.startswith(("_", "sitecustomize"))}


def test_no_modules_import_each_other() -> None:
    """In a circle, imports for types alone included, no module can be read by itself."""
    graph = grimp.build_graph("app", "workers", cache_dir=None)
    in_circles = {
        module
        for module in graph.modules
        if any(module in graph.find_upstream_modules(one) for one in graph.find_modules_directly_imported_by(module))
    }
    assert not in_circles
