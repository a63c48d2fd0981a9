"""An engine that tokenises nothing: a prompt of ids comes back as it was sent, any other prompt is three tokens.

For requests of many megabytes, which the simulator takes minutes to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

_IDS = re.compile(rb'"(?:input_ids|prompt)":\[([0-9,]+)\]')

_CHAT = (
    b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},'
    b'"finish_reason":"stop","prompt_token_ids":[%b],"response_token_ids":[7],"meta_info":{"finish_reason":'
    b'{"type":"stop"},"prompt_tokens":%d,"completion_tokens":1,"output_token_logprobs":[[-0.5,7,null]]}}]}'
)
_COMPLETION = (
    b'{"object":"text_completion","choices":[{"index":0,"text":"Hello","logprobs":{"token_logprobs":[-0.5],'
    b'"tokens":["Hello"]},"finish_reason":"stop","token_ids":[7],"prompt_token_ids":[%b]}],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":1}}'
)


@contextlib.asynccontextmanager
async def canned_engine() -> AsyncIterator[str]:
    """Its base URL."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            found = re.search(rb"content-length: *(\d+)", head)
            body = await reader.readexactly(int(found[1]) if found else 0)
            reply = _reply(head, body)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(reply)
            )
            writer.write(reply)
            await writer.drain()
    writer.close()


def _reply(head: bytes, body: bytes) -> bytes:
    if b"completions http" not in head:
        return b"{}"
    given = _IDS.search(body)
    ids = b"1,2,3" if given is None else given[1]
    return (_CHAT if b"chat/" in head else _COMPLETION) % (ids, ids.count(b",") + 1)
