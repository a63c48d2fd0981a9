"""A look past the service into its store, on either database, also while a server runs; and damage done to it."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import text

from app.store.engine import create_engine


def value(url: str, query: str, **parameters: Any) -> Any:
    """The first column of the only row."""

    async def run() -> Any:
        engine = create_engine(url)
        async with engine.connect() as connection:
            found = (await connection.execute(text(query), parameters)).scalar_one()
        await engine.dispose()
        return found

    return asyncio.run(run())


def vacuum(url: str) -> None:
    """Give back what was deleted. SQLite's server does so by itself."""

    async def run() -> None:
        engine = create_engine(url).execution_options(isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            await connection.execute(text("VACUUM FULL"))
        await engine.dispose()

    if not url.startswith("sqlite"):
        asyncio.run(run())


def change(url: str, statement: str, **parameters: Any) -> int:
    """How many rows were changed."""

    async def run() -> int:
        engine = create_engine(url)
        async with engine.begin() as connection:
            changed: int = (await connection.execute(text(statement), parameters)).rowcount
        await engine.dispose()
        return changed

    return asyncio.run(run())
