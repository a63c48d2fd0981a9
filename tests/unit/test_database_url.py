"""The parameters that clouds' consoles put into a PostgreSQL URL reach the driver, each where it takes it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.engine import make_url
from tables import rows

from app.store.database_url import driver_arguments

NAMED = {"application_name": "turnlog"}


@pytest.mark.parametrize(("query", "kept", "arguments"), rows("database_url_parameters"))
def test_each_parameter_has_its_place(query: str, kept: dict[str, Any], arguments: dict[str, Any] | None) -> None:
    url, given = driver_arguments(make_url(f"postgresql+asyncpg://me@host/db?{query}"), 5)
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in url.query.items()} == kept
    assert given == (arguments or {"timeout": 5.0, "server_settings": NAMED})
