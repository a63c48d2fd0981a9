"""Sphinx's configuration: `sphinx-build -aEW -c docs . site` makes the site of the documentation (docs/README.md).

The pages are plain Markdown that code hosts show as they are. What only the site needs is added here: its navigation,
which is the index in docs/README.md, and Mermaid's script, which `ops/setup docs` takes from npm, so that a reader's
browser asks no other host for anything.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

project = "Turnlog"
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**", "tests/README.md"]
exclude_patterns = [".*", "site", "build", "dist", "var", "app", "migrations", "ops", "turnlog", "workers"]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # as GitHub names them
html_theme = "furo"
html_title = "Turnlog"
html_show_copyright = False
html_copy_source = False

INDEX = "docs/README"
GUIDES = "docs/guides/README"
MERMAID = Path(sys.prefix) / "share" / "mermaid.min.js"
START_MERMAID = """document.addEventListener("DOMContentLoaded", () => {
    const chosen = document.body.dataset.theme;
    const dark = chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
    mermaid.initialize({theme: dark ? "dark" : "default"});
    mermaid.run();
});"""


def tables_of_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add toctrees, which a code host would show as code. A page that is in none is a warning, and so an error."""
    folder = Path(app.srcdir)
    if page == root_doc:
        for section in (folder / INDEX).with_suffix(".md").read_text().split("\n## ")[1:]:
            caption, _, rows = section.partition("\n")
            found = re.findall(r"^- \[[^\]]+\]\(([^)]+)\.md\)", rows, re.MULTILINE)
            pages = [normpath(PurePosixPath("docs", name)) for name in found]
            listed = [name for name in pages if name == GUIDES or not name.startswith("docs/guides/")]
            source[0] += _toctree(listed, caption)
        source[0] += _toctree([INDEX])
    if page == GUIDES:
        guides = sorted(path.stem for path in (folder / "docs" / "guides").glob("*.md"))
        source[0] += _toctree([name for name in guides if name != "README"])


def _toctree(pages: list[str], caption: str | None = None) -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


class Diagrams(SphinxPostTransform):
    """A fenced block of Mermaid becomes what Mermaid's script draws. Without the script it stays readable text."""

    default_priority = 1

    def run(self, **kwargs: Any) -> None:
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                text = f'<pre class="mermaid">{html.escape(block.astext())}</pre>'
                block.replace_self(nodes.raw("", text, format="html"))


def load_mermaid(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Load the script, on the pages that have a diagram."""
    if MERMAID.exists() and 'class="mermaid"' in context.get("body", ""):
        app.add_js_file(MERMAID.name)
        app.add_js_file(None, body=START_MERMAID)


def copy_mermaid(app: Sphinx, error: Exception | None) -> None:
    if MERMAID.exists() and error is None:
        shutil.copyfile(MERMAID, Path(app.outdir) / "_static" / MERMAID.name)


def setup(app: Sphinx) -> None:
    app.connect("source-read", tables_of_contents)
    app.connect("html-page-context", load_mermaid)
    app.connect("build-finished", copy_mermaid)
    app.add_post_transform(Diagrams)
