"""What a server says of a store: every read that there is, each answer by its question; and the archive of both."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from integration.stand import Stand

from app.export.formats import CONTAINERS, DOCUMENTS, SHAPES

STORE, ANSWERS, ABOUT = "turnlog.db", "answers", "about.json"

Question = str
"""Method, path and query."""

QUIET = {
    "TURNLOG_CLOSED_REPLAY_TTL_S": "off",
    "TURNLOG_WORKERS": "1",
    "TURNLOG_LOG_LEVEL": "warning",
}
"""A store is years old when it is asked: nothing may be freed for its age."""

BINARY = tuple(format for format in CONTAINERS if format != "ndjson")

EXPORTS: tuple[dict[str, str], ...] = (
    *({"format": "ndjson", "shape": shape, "explain": "true"} for shape in SHAPES),
    *({"format": "ndjson", "shape": shape, "advantage": "grpo"} for shape in ("tinker", "prime-rl", "atropos")),
    *({"format": format, "shape": shape, "group_id": "waiting"} for format in BINARY for shape in SHAPES),
    *({"format": format} for format in BINARY),
    *({"format": format} for format in DOCUMENTS),
    {"replay": "true", "explain": "true"},
    {"replay": "true", "shape": "miles"},
    {"replay": "true", "format": "safetensors"},
    {"max_seq_len": "40", "explain": "true"},
    {"max_staleness": "0", "weight_version": "9", "explain": "true"},
    {"status": "truncated"},
    {"status": "aborted"},
    {"session_status": "closed", "min_reward": "0.3"},
    {"group_id": "waiting", "advantage": "grpo"},
)


class Archive(NamedTuple):
    """An old store and what its own release said of it. `cursor`: of its export."""

    store: bytes
    answers: dict[Question, bytes]
    cursor: str


class Asker:
    """Asks a server everything. `cursor` continues an export that another server began."""

    def __init__(self, stand: Stand, cursor: str | None) -> None:
        self._http: httpx.Client = stand.http
        self.cursor = cursor
        self.answers: dict[Question, bytes] = {}

    def everything(self) -> None:
        listed = json.loads(self._get("/sessions", limit="1000").content)["sessions"]
        for head in sorted(listed, key=lambda head: head["session_id"]):
            self._session(head["session_id"], head["status"], head["turns"])
        for group in sorted({head["group_id"] for head in listed} - {None}):
            self._get(f"/groups/{group}")
        for query in EXPORTS:
            self._get("/export", **query)
        self._cursors()
        self._get("/export/groups", consumer="trainer", size="9", explain="true")

    def _session(self, name: str, status: str, turns: int) -> None:
        path = f"/sessions/{name}"
        self._get(path)
        log = self._get(f"{path}/events").content
        for line in log.splitlines():
            event = json.loads(line)
            if event.get("kept_bytes"):
                self._get(f"{path}/rejected/{event['fence']}")
        if status == "open":
            for body in ({"max_seq_len": None}, {"max_seq_len": 40}):
                self._ask("POST", f"{path}/samples", json=body)
            for turn in range(1, turns + 1):
                for kind in ("routed_experts", "indexer_topk"):
                    self._get(f"{path}/turns/{turn}/{kind}")

    def _cursors(self) -> None:
        """The window of the first release's export, whole and behind a row of it, and what has come since."""
        if self.cursor is None:
            self.cursor = self._http.get("/export").headers["x-turnlog-cursor"]
        whole = self._get("/export", cursor=self.cursor)
        rows = whole.content.splitlines()
        self._get("/export", cursor=json.loads(rows[len(rows) // 2])["cursor"])
        self._get("/export", cursor=whole.headers["x-turnlog-next-cursor"])

    def _get(self, path: str, **query: str) -> httpx.Response:
        return self._ask("GET", path, params=query)

    def _ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        reply = self._http.request(method, path, **given)
        assert reply.status_code < 500, (method, path, given, reply.text)
        what = "&".join(f"{name}={value}" for part in given.values() for name, value in part.items())
        self.answers[f"{method} {path}" + (f"?{what}" if what else "")] = b"%d\n" % reply.status_code + reply.content
        return reply


def pack(archive: Archive, to: Path) -> None:
    """Answers one after the other, those of alike questions beside each other, as one stream: that compresses best."""
    about = {"cursor": archive.cursor, "questions": list(archive.answers)}
    members = {ABOUT: json.dumps(about).encode(), STORE: archive.store}
    members |= {f"{ANSWERS}/{number:04}": body for number, body in enumerate(archive.answers.values())}
    with tarfile.open(to, "w:xz", preset=9) as tar:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))


def unpack(path: Path) -> Archive:
    with tarfile.open(path, "r:xz") as tar:
        found = {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}
    about = json.loads(found[ABOUT])
    answers = {question: found[f"{ANSWERS}/{number:04}"] for number, question in enumerate(about["questions"])}
    return Archive(found[STORE], answers, about["cursor"])
