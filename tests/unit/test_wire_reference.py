"""docs/wire.md is made from the OpenAPI document."""

from __future__ import annotations

import re

from app.api.openapi import document
from app.errors import ClientGone, codes
from app.main import create_app
from app.settings import Settings
from ops import wire_reference


def test_the_page_is_current() -> None:
    assert wire_reference.PAGE.is_current(), "run python -m ops.wire_reference"


def test_every_route_is_on_the_page() -> None:
    """A route whose tag the document does not have would be on no page."""
    paths = document(create_app(Settings()))["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"^### ([A-Z]+ /.*)$", wire_reference.generate(), re.MULTILINE)) == routes


def test_every_code_is_on_the_page() -> None:
    """But that of a client that is gone, which only the log has."""
    errors = wire_reference.generate().partition("\n## Errors\n")[2]
    assert set(re.findall(r"^\| \**`(\w+)`", errors, re.MULTILINE)) == codes().keys() - {ClientGone.code}


def test_its_links_lead_somewhere() -> None:
    text = wire_reference.generate()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert len(links) > 60
    assert links <= anchors


def test_every_table_is_one() -> None:
    """As many cells in each row as in its head."""
    widths: list[int] = []
    for line in wire_reference.generate().splitlines():
        if not line.startswith("|"):
            widths.clear()
            continue
        widths.append(line.count("|"))
        assert widths[-1] == widths[0], line
    assert "| --- |" in wire_reference.generate()
