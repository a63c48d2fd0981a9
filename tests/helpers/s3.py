"""A local S3 server in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx

from ops.server import PORT, OwnProcess

BUCKET = "backups"


class S3Server(OwnProcess):
    """Keeps its objects in memory."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", PORT]
        super().__init__(command, folder / "s3.log", environment=dict(os.environ))

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/moto-api/").is_success
        except httpx.TransportError:
            return False

    def bucket(self) -> dict[str, str]:
        """The environment of a program that uses BUCKET, which is new."""
        assert httpx.put(f"{self.base_url}/{BUCKET}").is_success
        return {
            "AWS_ENDPOINT_URL": self.base_url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
