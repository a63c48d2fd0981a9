"""A local S3 server in a thread of the test, which may be slow, fail, be full or be gone."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable
from threading import Event, Thread
from typing import Any, Literal

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

from app.features.objects.names import parsed

Weather = Literal["fair", "slow", "failing", "gone", "full"]

NAME = "turnlog"
HELD_S = 60.0
_numbers = itertools.count()


class _Handler(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        """Say nothing."""


class TestBucket:
    """A bucket of its own. `slow_s` is how long each request takes in slow weather; of failing ones a fifth fails.

    Uploads whose name has the text `held` wait from `reached` until `released`."""

    __test__ = False

    def __init__(self) -> None:
        self.weather: Weather = "fair"
        self.requests = 0
        self.held = ""
        self.reached, self.released = Event(), Event()
        self.slow_s = 0.5
        self._rng = random.Random(7)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.name = f"{NAME}-{next(_numbers)}"
        self._s3: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self._s3.create_bucket(Bucket=self.name)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a server needs to use the bucket."""
        return {
            "TURNLOG_PAYLOADS": f"s3://{self.name}/run",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def objects(self) -> dict[str, bytes]:
        """The objects of sessions, by their names below the URL."""
        found = {}
        for listed in self._s3.list_objects_v2(Bucket=self.name).get("Contents", []):
            if parsed(name := listed["Key"].removeprefix("run/")) is not None:
                with contextlib.suppress(self._s3.exceptions.NoSuchKey):  # deleted since
                    found[name] = self._s3.get_object(Bucket=self.name, Key=listed["Key"])["Body"].read()
        return found

    def keep_versions(self) -> None:
        """From now on, keep old versions of objects."""
        self._s3.put_bucket_versioning(Bucket=self.name, VersioningConfiguration={"Status": "Enabled"})

    def versions(self) -> list[str]:
        """The names of the sessions' objects of which a version or a delete marker is left."""
        found = self._s3.list_object_versions(Bucket=self.name)
        every = [*found.get("Versions", []), *found.get("DeleteMarkers", [])]
        return [one["Key"] for one in every if parsed(one["Key"].removeprefix("run/")) is not None]

    def lose(self, name: str) -> None:
        """Delete an object behind the server's back."""
        self._s3.delete_object(Bucket=self.name, Key=f"run/{name}")

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.requests += 1
        weather = self.weather
        if self.held and environ["REQUEST_METHOD"] == "PUT" and self.held in environ["PATH_INFO"]:
            self.reached.set()
            self.released.wait(HELD_S)
        if weather == "gone":
            environ["werkzeug.socket"].close()
            raise ConnectionError("the bucket is gone")
        if weather == "slow":
            time.sleep(self.slow_s)
        if weather == "full" and environ["REQUEST_METHOD"] == "PUT":
            return Response("full", status=507)(environ, start_response)
        if weather == "failing" and self._rng.random() < 0.2:
            return Response("later", status=503)(environ, start_response)
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer
