"""The parameters that clouds' consoles put into a PostgreSQL URL reach the driver, each where it takes it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.engine import make_url

from app.store.database_url import driver_arguments

NAMED = {"application_name": "turnlog"}


@pytest.mark.parametrize(
    ("query", "kept", "arguments"),
    [
        ("", {}, {"timeout": 5.0, "server_settings": NAMED}),
        ("sslmode=require", {}, {"timeout": 5.0, "server_settings": NAMED, "dsn": "postgresql://?sslmode=require"}),
        ("ssl=disable", {}, {"timeout": 5.0, "server_settings": NAMED, "dsn": "postgresql://?sslmode=disable"}),
        (
            "sslmode=verify-full&sslrootcert=/etc/my%20ca.pem",
            {},
            {
                "timeout": 5.0,
                "server_settings": NAMED,
                "dsn": "postgresql://?sslmode=verify-full&sslrootcert=%2Fetc%2Fmy+ca.pem",
            },
        ),
        ("connect_timeout=30", {}, {"timeout": 30.0, "server_settings": NAMED}),
        ("connect_timeout=0&channel_binding=prefer", {}, {"timeout": None, "server_settings": NAMED}),
        (
            "application_name=trainer&options=-c%20geqo%3Doff",
            {},
            {"timeout": 5.0, "server_settings": {"application_name": "trainer", "options": "-c geqo=off"}},
        ),
        ("host=/run/postgresql&port=6432", {"host": "/run/postgresql", "port": "6432"}, None),
        ("host=a:5432&host=b:5432", {"host": ("a:5432", "b:5432")}, None),
        ("prepared_statement_cache_size=0", {"prepared_statement_cache_size": "0"}, None),
    ],
)
def test_each_parameter_has_its_place(query: str, kept: dict[str, Any], arguments: dict[str, Any] | None) -> None:
    url, given = driver_arguments(make_url(f"postgresql+asyncpg://me@host/db?{query}"), 5)
    assert dict(url.query) == kept
    assert given == (arguments or {"timeout": 5.0, "server_settings": NAMED})
