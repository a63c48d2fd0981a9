"""A look past the service into its store, on either database, also while a server runs; and damage done to it."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import text

from helpers.databases import connected


def value(url: str, query: str, **parameters: Any) -> Any:
    """The first column of the only row."""

    async def run() -> Any:
        async with connected(url) as connection:
            return (await connection.execute(text(query), parameters)).scalar_one()

    return asyncio.run(run())


def vacuum(url: str) -> None:
    """Give back what was deleted. SQLite's server does so by itself."""

    async def run() -> None:
        async with connected(url) as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            await connection.execute(text("VACUUM FULL"))

    if not url.startswith("sqlite"):
        asyncio.run(run())


def change(url: str, statement: str, **parameters: Any) -> int:
    """How many rows were changed."""

    async def run() -> int:
        async with connected(url, writes=True) as connection:
            changed: int = (await connection.execute(text(statement), parameters)).rowcount
            return changed

    return asyncio.run(run())
