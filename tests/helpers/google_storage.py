"""A local server that answers as Google Cloud Storage does: each writing of an object gets a number, its generation."""

from __future__ import annotations

import itertools
import json
from threading import Thread

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

MODIFIED = "Wed, 01 Jan 2025 00:00:00 GMT"


class _Handler(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        """Say nothing."""


class GoogleStorage:
    """https://cloud.google.com/storage/docs/xml-api/overview, as far as objects need it.

    `keeps_versions`: earlier generations of an object can still be read.
    """

    def __init__(self, *, keeps_versions: bool = False) -> None:
        self.objects: dict[str, dict[str, bytes]] = {}
        self._keeps_versions = keeps_versions
        self._generations = itertools.count(1_700_000_000_000_000)
        self._server = make_server(
            "127.0.0.1", 0, Request.application(self._answer), threaded=True, request_handler=_Handler
        )
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find the server."""
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        account = {"client_email": "", "private_key": "", "private_key_id": ""}
        key = {**account, "gcs_base_url": endpoint, "disable_oauth": True}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "AWS_ENDPOINT_URL": endpoint}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _answer(self, request: Request) -> Response:
        kept = self.objects.setdefault(request.path, {})
        match request.method:
            case "PUT":
                if kept and request.headers.get("x-goog-if-generation-match") == "0":
                    return Response(status=412)
                generation = str(next(self._generations))
                if not self._keeps_versions:
                    kept.clear()
                kept[generation] = request.get_data()
                return Response(headers={"etag": '"e"', "x-goog-generation": generation})
            case "DELETE":
                del self.objects[request.path]
                return Response(status=204)
        generation = request.args.get("generation") or max(kept, default="")
        if generation not in kept:
            return Response(status=404)
        headers = {"etag": '"e"', "x-goog-generation": generation, "last-modified": MODIFIED}
        return Response(kept[generation], headers=headers)
