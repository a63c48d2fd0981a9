"""Keeps a pause shut while the body of `weights` runs."""

from __future__ import annotations

import contextlib
import logging
import threading

from turnlog.client._sync.transport import Transport
from turnlog.errors import Conflict, TurnlogError

log = logging.getLogger("turnlog.weights")

RENEWALS = 4
"""In each lease: three may fail."""


class Renewal:
    """Extends the lease of the pause at `path`, from a thread, since the body may block its own and the event loop.

    A renewal names the pause by its `closings`, so one that arrives late shuts no gate again, and nobody has to wait
    for the thread. It ends with the process.
    """

    def __init__(
        self, base_url: str, token: str | None, proxy: str | None, path: str, closings: int, lease_s: float
    ) -> None:
        self._transport = Transport(base_url, token, lease_s, lease_s / 2, proxy)
        self._path = path
        self._body = {"lease_s": lease_s, "renews": closings}
        self._every_s = lease_s / RENEWALS
        self._ended = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._renew, name="turnlog-renewal", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _renew(self) -> None:
        with contextlib.closing(self._transport):
            while not self._ended.wait(self._every_s):
                try:
                    self._transport.call("POST", self._path, body=self._body)
                except Conflict:
                    if not self._ended.is_set():
                        log.warning(
                            "%s has ended before the weights were changed: turns are no longer held",
                            self._path,
                        )
                    return
                except TurnlogError as error:
                    log.warning("the lease of %s could not be renewed: %s", self._path, error)
