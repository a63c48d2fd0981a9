"""SQLAlchemy's asynchronous engine without its ORM.

The package `sqlalchemy.ext.asyncio` imports the ORM, which is not used here and takes a tenth of the start-up time; its
module `engine` does not. That module is imported as if the package were empty. A later import of the package gets all
of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

__all__ = ["AsyncConnection", "AsyncEngine", "create_async_engine"]

_PACKAGE = "sqlalchemy.ext.asyncio"


def _engine() -> Any:
    spec = None if _PACKAGE in sys.modules else importlib.util.find_spec(_PACKAGE)
    if spec is None:
        return importlib.import_module(_PACKAGE)
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(f"{_PACKAGE}.engine")
    finally:
        del sys.modules[_PACKAGE]


if not TYPE_CHECKING:
    _found = _engine()
    AsyncConnection = _found.AsyncConnection
    AsyncEngine = _found.AsyncEngine
    create_async_engine = _found.create_async_engine
