"""Completions as a stream, and through the OpenAI SDK."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from integration.stand import Stand
from integration.writing import Writing


def streamed(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_is_the_committed_reply(every: Stand) -> None:
    writing = Writing(every)
    response = writing.ask("Once", stream=True, stream_options={"include_usage": True})
    *pieces, chunk = streamed(response)
    [record] = writing.state()["records"]
    choice, stored = chunk["choices"][0], record["response"]["choices"][0]
    text = "".join(one["choices"][0]["text"] for one in (*pieces, chunk))
    assert (text, choice["finish_reason"]) == (stored["text"], stored["finish_reason"])
    assert (chunk["object"], chunk["usage"]) == ("text_completion", record["response"]["usage"])
    assert "prompt_token_ids" not in choice
    assert "stream" not in record["request"]
    writing.text = "Once" + text
    writing.write(" more")


def test_the_openai_sdk_completes_with_and_without_a_stream(every: Stand) -> None:
    writing = Writing(every)
    base_url = f"{every.server.base_url}{writing.path}/v1"
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        one = client.completions.create(model="simulator", prompt="Once", max_tokens=8)
        text = "Once" + one.choices[0].text + " and"
        pieces = list(client.completions.create(model="simulator", prompt=text, max_tokens=8, stream=True))
        text += "".join(piece.choices[0].text for piece in pieces if piece.choices)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="simulator", prompt="Another", max_tokens=8)
        assert caught.value.code == "history_mismatch"
        client.completions.create(model="simulator", prompt=text, max_tokens=8)
    assert len(writing.committed()) == 3
    assert "RolledBack" not in writing.types()
