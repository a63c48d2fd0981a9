"""The engines that a trainer starts, as engines of its run."""

from __future__ import annotations

import contextlib
import logging

from turnlog import AsyncTurnlog
from turnlog.errors import Conflict, NotFound

log = logging.getLogger("turnlog.integrations.engines")


async def take_engine(turnlog: AsyncTurnlog, url: str, run: str) -> None:
    """Make the engine the run's alone. Its trainer has just started it: what Turnlog has of that address is of a
    training before, or of the setting.

    Raises ValueError, which names the engine, where the token may not change that, and TurnlogError.
    """
    try:
        await turnlog.add_engine(url, run=run)
    except Conflict as error:
        if error.code != "run_mismatch":
            raise ValueError(
                f"{url} is in Turnlog's pool for other runs, which the token of run {run} may not change: "
                f"remove it with the admin token (DELETE /engines?url={url})"
            ) from error
        log.warning("run %s now has the engine of its trainer to itself: %s", run, error.message)
        with contextlib.suppress(NotFound):
            await turnlog.remove_engine(url)
        await turnlog.add_engine(url, run=run)
