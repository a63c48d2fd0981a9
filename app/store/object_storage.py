"""Opens S3, Google Cloud Storage and Azure.

Credentials, regions and endpoints come from the environment, by the names that each vendor's own tools use
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, …).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.store import AzureStore, GCSStore, S3Store, from_url

if TYPE_CHECKING:
    from obstore.store import BackoffConfig

RemoteStore = S3Store | GCSStore | AzureStore

S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINTS = (*S3_ENDPOINTS, "AZURE_STORAGE_ENDPOINT")
"""Variables with the address of an own server; one that begins with `http://` allows HTTP."""

CONNECT_S = 5


def open_remote(url: str, *, answer_s: float, retry_s: float) -> RemoteStore:
    """The storage at `url`. A request may take `answer_s` seconds, and is repeated, with growing pauses, for `retry_s`.

    Raises obstore's BaseError, ValueError.
    """
    pauses: BackoffConfig = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3)}
    store = from_url(
        url,
        client_options={
            "allow_http": any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(seconds=answer_s),
        },
        retry_config={"max_retries": 1000, "retry_timeout": timedelta(seconds=retry_s), "backoff": pauses},
    )
    assert isinstance(store, RemoteStore)
    return store


def s3_endpoint() -> str | None:
    """The address of an S3 server that is not Amazon's."""
    return next((value for name in S3_ENDPOINTS if (value := os.environ.get(name))), None)


def first_line(error: BaseException) -> str:
    """obstore's messages go on with the structure of the fault."""
    return str(error).partition("\n")[0]
