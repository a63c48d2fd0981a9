"""Which replies are validated in the API process, and the text of a prompt's ids that a worker has validated."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.replies import Changes, body_of, known_as

from app.errors import UpstreamInvalid
from app.turn.validation import LIGHTER, ReplyValidator, Weighed, text_in
from app.upstream.body import Body
from app.upstream.client import EngineReply
from workers import job
from workers.parse import token_text
from workers.parse_prompt import KnownText
from workers.reply import Job

IDS = [place * 7919 % 50_000 for place in range(3000)]
LIMIT = 2000


def a_body(separators: tuple[str, str] = (",", ":"), *changes: Changes) -> bytes:
    counts = dict.fromkeys(("usage.prompt_tokens", "choices.0.meta_info.prompt_tokens"), len(IDS))
    return body_of("sglang", {**counts, "choices.0.prompt_token_ids": IDS}, *changes, separators=separators)


def text_of(ids: list[int]) -> KnownText:
    return KnownText(known_as(ids), bytearray(token_text(ids)), hashlib.sha256(token_text(ids)))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_text_of_a_reply_that_a_worker_has_validated(separators: tuple[str, str], parts: int) -> None:
    body = a_body(separators)
    result = job.decode_done(job.run(job.encode(Job("auto", None, [], [], [], 200, "", b"")), memoryview(body)))
    step = len(body) // parts + 1
    made = text_in(Body([body[start : start + step] for start in range(0, len(body), step)]), result)
    assert made is not None
    text = made()
    assert text is not None
    assert text.known == result.sequence == known_as([*IDS, 10, 11])
    assert text.begins(token_text([*IDS, 10, 11]), 0)
    other = text_in(Body([body.replace(b"7919", b"7918", 1)]), result)
    assert other is not None
    assert other() is None


@pytest.mark.parametrize(
    ("known", "is_light"), [(IDS[:2900], True), (IDS[:10], False), ([*IDS[:10], 7], False), (None, False)]
)
def test_a_prompt_whose_text_is_known_weighs_nothing(known: list[int] | None, is_light: bool) -> None:
    body, text = Body([a_body()]), None if known is None else text_of(known)
    assert len(a_body()) > LIMIT * 8
    weighed = Weighed(body, 10, LIMIT, None if text is None else text.known, text)
    assert weighed.is_light == is_light
    assert not Weighed(body, LIMIT + 1, LIMIT, None if text is None else text.known, text).is_light
    assert (
        Weighed(Body([memoryview(a_body())]), 10, LIMIT, None if text is None else text.known, text).is_light
        == is_light
    )


def test_the_limit_decides_alone_of_a_short_reply() -> None:
    body = Body([body_of("sglang")])
    assert Weighed(body, 10, LIMIT, None, None).is_light
    assert not Weighed(body, LIMIT, LIMIT, None, None).is_light
    assert not Weighed(body, 0, 0, None, None).is_light
    assert not Weighed(Body([b"x" * (LIMIT * LIGHTER + 1)]), 0, LIMIT, None, None).is_light


class _Pool:
    """Runs what a worker would, and keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def run(self, asked: bytes, *pieces: bytes) -> bytes:
        self.bodies.append(b"".join(pieces))
        return job.run(asked, memoryview(self.bodies[-1]))


@pytest.mark.anyio
async def test_a_long_reply_that_is_refused_is_read_whole_by_a_worker_alone() -> None:
    pool: Any = _Pool()
    settings: Any = SimpleNamespace(inline_max_bytes=LIMIT)
    validator, text = ReplyValidator(pool, settings), text_of(IDS[:2900])
    asked = Job("auto", text.known, [], [], [], 200, "", b"")
    long, is_refused = a_body(), {"choices.0.message.role": "user"}
    refused, short = a_body((",", ":"), is_refused), body_of("sglang", is_refused)
    reply, *_ = await validator.by_all_rules(asked, EngineReply(200, [], Body([long])), 0, text)
    assert (reply.base, pool.bodies) == (2900, [])
    for body, given in ((refused, [refused]), (short, [])):
        pool.bodies.clear()
        with pytest.raises(UpstreamInvalid, match="role must be assistant"):
            await validator.by_all_rules(asked, EngineReply(200, [], Body([body])), 0, text)
        assert pool.bodies == given
