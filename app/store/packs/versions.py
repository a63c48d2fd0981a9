"""Deletes every version of an object: in a bucket that keeps old ones, a deletion alone hides the bytes.

obstore has no call for versions, so that Amazon's own package is used, which speaks to every S3.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from app.errors import PayloadsUnavailable
from app.extras import install
from app.store.object_storage import s3_endpoint


class Versions:
    """The versions below an S3 URL. For other storage, and without boto3, nothing can be deleted for good."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._is_s3 = parts.scheme == "s3"
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._client: Any = None

    @property
    def consequence(self) -> str:
        """What follows for who runs the store."""
        return "an erasure deletes those too" if self._is_s3 else "nothing is deleted there; turn versioning off"

    def delete(self, name: str) -> None:
        """Delete all versions of an object. Raises PayloadsUnavailable."""
        client = self._opened()
        from botocore.exceptions import BotoCoreError, ClientError  # comes with boto3

        key = f"{self._prefix}/{name}".lstrip("/")
        try:
            pages = client.get_paginator("list_object_versions").paginate(Bucket=self._bucket, Prefix=key)
            for page in pages:
                for one in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
                    if one["Key"] == key:
                        client.delete_object(Bucket=self._bucket, Key=key, VersionId=one["VersionId"])
        except (BotoCoreError, ClientError) as error:
            raise PayloadsUnavailable(f"versions of {key} cannot be deleted: {error}") from error

    def _opened(self) -> Any:
        if not self._is_s3:
            raise PayloadsUnavailable("only S3's versions can be deleted: turn versioning off for this bucket")
        if self._client is None:
            try:
                import boto3
            except ImportError as error:
                raise PayloadsUnavailable(
                    f"the bucket keeps old versions, and deleting them needs a package: {install('versions')}"
                ) from error
            region = os.environ.get("AWS_REGION")  # boto3 itself looks for other names than obstore
            self._client = boto3.client("s3", endpoint_url=s3_endpoint(), region_name=region)
        return self._client
