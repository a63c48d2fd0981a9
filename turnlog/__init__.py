"""A small client for rollout code, and the command line.

from turnlog import Turnlog, AsyncTurnlog
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnlog.client.names import *  # noqa: F403
else:
    # For type checkers the names are those above: with a `__getattr__` any other name would be one, too, of type Any.
    def __getattr__(name: str) -> object:
        """The client is imported at first use: `turnlog --help` needs neither httpx nor numpy."""
        from importlib.util import find_spec

        # `from turnlog import replies` asks here before it imports the module.
        if (name.startswith("_") and name != "__all__") or find_spec(f"{__name__}.{name}") is not None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from turnlog.client import names

        if name == "__all__":
            return [public for public in vars(names) if not public.startswith("_")]
        try:
            found = globals()[name] = getattr(names, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        return found
