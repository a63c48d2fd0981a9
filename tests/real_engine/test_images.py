"""A model that sees images at a real engine: rows have its ids, placeholders included, and the images."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.proxy import RecordingProxy
from integration.test_images import asks, image, sha256
from integration.tito import checked

from ops.engine.process import SERVED_AS, EngineProcess, is_installed
from real_engine.compared import Lane, count
from real_engine.table import Found
from tests.tools.real_engine.models import image_model
from tests.tools.tito_check import tokenizers

pytestmark = pytest.mark.real_engine

TOKENS = 4
"""Placeholders of an image: 4 x 4 patches, of which 2 x 2 become a token."""


def png(width: int, height: int) -> bytes:
    """A picture of stripes."""
    rows = b"".join(b"\0" + bytes([200, number % 256, 50]) * width for number in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    pieces = ((len(data), name + data) for name, data in chunks)
    written = (struct.pack(">I", size) + piece + struct.pack(">I", zlib.crc32(piece)) for size, piece in pieces)
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    if not is_installed():
        pytest.skip("there is no engine: sh ops/setup real-engine")
    with EngineProcess(image_model(), tmp_path_factory.mktemp("engine")) as made:
        yield made


@pytest.fixture(params=["capture", "tito"])
def lane(request: pytest.FixtureRequest, engine: EngineProcess, tmp_path: Path) -> Iterator[Lane]:
    """With a tokenizer too, turns with images are captured."""
    environment = (
        {"TURNLOG_TOKENIZER": str(image_model()), "TURNLOG_UPSTREAM_DIALECT": "vllm"} if request.param == "tito" else {}
    )
    with (
        RecordingProxy(engine.base_url) as proxy,
        checked(tmp_path, proxy.base_url, environment=environment) as stand,
    ):
        yield Lane(stand, proxy, image_model(), builds_prompts=False)


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_two_turns_with_images_over_a_kill(lane: Lane, protocol: str, found: Found) -> None:
    """After it the first image comes from the store."""
    pictures = png(80, 60), png(30, 90)
    asked: dict[str, Any] = {"model": SERVED_AS, "max_tokens": 12, "temperature": 0}
    talk = lane.stand.talk(protocol)
    talk.add(asks(protocol, "What is it?", image(protocol, pictures[0])), **asked)
    lane.stand.server.kill()
    lane.stand.server.start()
    talk.add(asks(protocol, "And this?", image(protocol, pictures[1])), **asked)

    replies = lane.replies()
    records = {record["turn"]: record["response"] for record in talk.state()["records"]}
    placeholder = tokenizers.load(lane.model).convert_tokens_to_ids("<image>")
    rows = talk.rows(images="inline")
    for row in rows:
        for span in row["turns"]:
            said = records[span["turn"]]
            assert said == replies[said["id"]]
            count(found, row, span, said)
    shown = rows[-1]["images"]
    assert [(one["turn"], one["sha256"]) for one in shown] == list(enumerate(map(sha256, pictures), 1))
    assert [base64.b64decode(one["bytes"]) for one in shown] == list(pictures)
    assert [said["prompt_token_ids"].count(placeholder) for said in replies.values()] == [TOKENS, 2 * TOKENS]
    assert rows[-1]["tokens"].count(placeholder) == 2 * TOKENS
    assert not any(turn.get("sent_ids") for turn in talk.committed())
    found.sessions, found.turns, found.kills, found.rows = 1, len(records), 1, len(rows)
    assert (found.wrong_ids, found.wrong_logprobs) == (0, 0)
