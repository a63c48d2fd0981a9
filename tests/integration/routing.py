"""Replay payloads as a test sees them: in an engine's own bytes, in Turnlog's routes and in its store."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt

from integration.places import Place
from integration.proxy import RecordingProxy
from integration.stand import Stand, Talk, serving
from ops.verify import verify_url

EXPERTS, POSITIONS, MASK = "routed_experts", "indexer_topk", "sampling_mask"
KINDS = (EXPERTS, POSITIONS)
BOTH = {"TURNLOG_REPLAY": "routed_experts,indexer_topk"}
Rows = npt.NDArray[Any]
Sets = list[list[int]]


class Session(Talk):
    """A session whose payloads are looked at."""

    def __init__(self, stand: Stand, session_id: str) -> None:
        super().__init__(stand, session_id)
        self.stand = stand


def session_of(stand: Stand, **body: Any) -> Session:
    """A new session."""
    return Session(stand, stand.talk(**body).id)


class Recorded:
    """A stand whose engine's replies are kept as they were sent."""

    def __init__(self, stand: Stand, proxy: RecordingProxy) -> None:
        self.stand = stand
        self.proxy = proxy

    @property
    def sent(self) -> bytes:
        """The engine's last reply."""
        return self.proxy.replies[-1]

    def talk(self, **body: Any) -> Session:
        return session_of(self.stand, **body)


@contextlib.contextmanager
def recorded(where: Path | Place, engine: str, environment: Mapping[str, str]) -> Iterator[Recorded]:
    """A server with this environment behind a recorder of the engine at that URL."""
    with (
        RecordingProxy(engine) as proxy,
        serving(where, proxy.base_url, environment=environment, engine_url=engine) as stand,
    ):
        yield Recorded(stand, proxy)


def text_of(body: bytes, kind: str) -> bytes | None:
    """A payload's raw JSON in a reply's body; None where there is none."""
    choice = msgspec.json.decode(msgspec.json.decode(body, type=dict[str, msgspec.Raw])["choices"], type=list[Any])[0]
    home = choice.get("meta_info", choice)
    if kind not in home:
        return None
    start = body.index(f'"{kind}":'.encode()) + len(kind) + 3
    end = start + len(json.dumps(home[kind], separators=(",", ":")))
    assert json.loads(body[start:end]) == home[kind]
    return body[start:end]


def without(body: bytes, *kinds: str) -> bytes:
    """The body with null for the values of these kinds."""
    for kind in kinds:
        text = text_of(body, kind)
        if text is not None:
            body = body.replace(text, b"null", 1)
    return body


def tokens_in(body: bytes) -> int:
    usage = json.loads(body)["usage"]
    return int(usage["prompt_tokens"] + usage["completion_tokens"])


def rows_in(body: bytes, kind: str = EXPERTS) -> Rows:
    """The rows in an engine's reply, as [rows, ids a row]."""
    text = text_of(body, kind)
    assert text is not None
    value = json.loads(text)
    if isinstance(value, list):
        found = np.array(value)
    else:
        raw = base64.b64decode(value)
        is_file = raw.startswith(b"\x93NUMPY")
        found = np.load(io.BytesIO(raw)) if is_file else np.frombuffer(raw, "<i4").reshape(tokens_in(body) - 1, -1)
    return found.reshape(len(found), -1)


class Fetched(msgspec.Struct, frozen=True):
    """What the payload's route gives; `shape` is that of all rows, rows first."""

    rows: Rows
    start: int
    shape: list[int]
    dtype: str


def fetch(talk: Session, turn: int, kind: str = EXPERTS) -> httpx.Response:
    return talk.stand.http.get(f"{talk.path}/turns/{turn}/{kind}")


def fetched(talk: Session, turn: int, kind: str = EXPERTS) -> Fetched:
    """A payload that must be there."""
    response = fetch(talk, turn, kind)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    shape, dtype = json.loads(response.headers["x-turnlog-shape"]), response.headers["x-turnlog-dtype"]
    rows = np.frombuffer(response.content, np.dtype(dtype).newbyteorder("<"))
    assert rows.size == np.prod(shape)
    return Fetched(rows.reshape(shape[0], -1), int(response.headers["x-turnlog-row-start"]), shape, dtype)


def sets_in(body: bytes) -> Sets:
    """The ids that each sampled token was drawn from, in an engine's reply."""
    choice = json.loads(body)["choices"][0]
    meta = choice.get("meta_info")
    found: Sets = choice[MASK] if meta is None else meta["output_token_sampling_mask"]
    return found


def split(ids: Any, offsets: Any) -> Sets:
    return [list(map(int, ids[first:stop])) for first, stop in pairwise(offsets)]


def sets_of(row: Mapping[str, Any]) -> Sets:
    """What a row of the shape `turnlog` says of each of its tokens but the first."""
    mask = row[MASK]
    assert (mask["row_start"], mask["rows"]) == (0, len(row["tokens"]) - 1)
    return split(np.frombuffer(base64.b64decode(mask["data"]), mask["dtype"]), mask["offsets"])


def payload_rows(row: Mapping[str, Any], kind: str = EXPERTS) -> Rows:
    """A payload of a row of the shape `turnlog`, which begins with row 0."""
    data, about = (row[kind], row) if kind == EXPERTS else (row[kind]["data"], row[kind])
    assert about["row_start"] == 0
    return np.frombuffer(base64.b64decode(data), about["dtype"]).reshape(about["rows"], -1)


def own_rows(row: Mapping[str, Any], given: Mapping[int, Rows]) -> Rows:
    """Each turn's rows of its own tokens, as its reply had them."""
    parts, at = [], 0
    for span in row["turns"]:
        parts.append(given[span["turn"]][at : span["end"] - 1])
        at = span["end"] - 1
    return np.concatenate(parts)


def is_of_the_decode(row: Mapping[str, Any], replies: Iterable[httpx.Response]) -> bool:
    """Has a row all three kinds, each as the replies of its turns had them?"""
    bodies = {int(reply.headers["x-turnlog-turn"]): reply.content for reply in replies}
    sets: Sets = [[] for _ in row["tokens"]]
    for span in row["turns"]:
        sets[span["output_start"] : span["end"]] = sets_in(bodies[span["turn"]])
    given = {kind: {turn: rows_in(body, kind) for turn, body in bodies.items()} for kind in KINDS}
    return sets_of(row) == sets[1:] and all(
        np.array_equal(payload_rows(row, kind), own_rows(row, given[kind])) for kind in KINDS
    )


def asks_for_all(turn: int, **experts: int) -> dict[str, Any]:
    """Fields of a request for all three kinds, whose rows SGLang gives otherwise than in another turn."""
    shifted = {"experts": {"shift": turn, **experts}, POSITIONS: {"shift": turn}}
    asked = dict.fromkeys(("return_routed_experts", "return_indexer_topk", "return_sampling_mask"), True)
    return {"sim": {"tool_calls": False, "completion_tokens": 3 + turn, **shifted}, "top_k": 8, **asked}


def live_payloads(talk: Talk, kind: str = EXPERTS) -> list[bool]:
    """Of each live turn: is its payload's value in the record?"""
    found = []
    for record in talk.state()["records"]:
        choice = record["response"]["choices"][0]
        found.append(choice.get("meta_info", choice)[kind] is not None)
    return found


def problems(stand: Stand) -> list[str]:
    """What `ops.verify` finds wrong in the stand's store."""
    report = asyncio.run(verify_url(stand.url))
    return [f"{problem.session_id}: {problem.what}" for problem in report.problems]
