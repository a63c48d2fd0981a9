"""Opens the object storage that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.settings import Settings

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket


def open_bucket(settings: Settings) -> Bucket | None:
    """The object storage of replay payloads; None if all are in the database. Raises StartupError for a URL that
    names no storage."""
    if settings.bucket_url is None:
        return None
    from app.store.packs.bucket import Bucket  # a twentieth of a second, which most starts do not need

    return Bucket(settings.bucket_url, settings.payloads_timeout_s)
