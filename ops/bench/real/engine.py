"""A fast stand-in for SGLang or vLLM: a request's tag says what it is and what to sample, and a reply is cut from
`Material`, at the cost of one copy."""

from __future__ import annotations

import itertools
from collections import Counter

from ops.bench.real.material import CONTENT, LOGPROB, TRIPLE, Material, Tag
from ops.bench.real.relay import NOT_FOUND, Piece, Reply, parser_with_port, serve

WEIGHT_VERSION = "7"
CALLED = "run"
WORDS_A_CHUNK = 6
PARAMS = 4096
"""Bytes of a request that have its parameters."""
SHAPES = ("sglang", "vllm")

_STATE = {
    ("sglang", "/model_info"): b'{"model_path":"m","is_generation":true,"weight_version":"7"}',
    ("vllm", "/is_paused"): b'{"is_paused":false}',
    ("vllm", "/weight_info"): b'{"weight_version":"7"}',
}


class Engine:
    """The engine. A turn that is asked for again is sampled again, with other logprobs; its text says which it is."""

    def __init__(self, shape: str, material: Material) -> None:
        self._shape = shape
        self._material = material
        self._asked: Counter[str] = Counter()

    async def answer(self, path: str, body: bytes) -> Reply:
        if path == "/v1/completions":
            return Reply(self._completion(body))
        if path == "/v1/chat/completions":
            tag = Tag.newest_in(body)
            self._asked[tag.name] += 1
            is_streamed = body.find(b'"stream":true', 0, 65536) >= 0
            attempt = self._asked[tag.name]
            made = self._stream(tag, attempt) if is_streamed else self._chat(tag, attempt, _rid(body))
            return Reply(made, streamed=is_streamed)
        if path == "/health":
            return Reply([b"{}"])
        state = _STATE.get((self._shape, path))
        return NOT_FOUND if state is None else Reply([state])

    def _form(self, form: bytes, *values: object) -> bytes:
        return self._material.spelled(form) % values

    def _usage(self, prompt: int, sampled: int) -> bytes:
        form = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
        return self._form(form, prompt, sampled, prompt + sampled)

    def _versions(self, sampled: int) -> bytes:
        """vLLM's."""
        return self._form(b'"weight_versions":[{"version":"7","start":0,"end":%d}]', sampled)

    def _call_id(self, tag: Tag, attempt: int) -> bytes:
        return f"call_{tag.name}_{attempt}".encode()

    def _chat(self, tag: Tag, attempt: int, rid: bytes) -> list[Piece]:
        """A whole reply. Its id is its request's, if that has one, as SGLang's is."""
        made, prompt = self._material, sum(count for _, count in tag.prompt)
        comma, (_, count) = made.comma, tag.sampled
        content, arguments = made.said(tag, attempt)
        call, finish = b"", b"stop"
        if tag.calls:
            form = b',"tool_calls":[{"id":"%b","type":"function","function":{"name":"run","arguments":"%b"}}]'
            call, finish = self._form(form, self._call_id(tag, attempt), arguments), b"tool_calls"
        head = b'{"id":"%b","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{'
        form = head + b'"role":"assistant","content":"%b"%b},"finish_reason":"%b",'
        begun = self._form(form, rid or f"chat-{tag.name}-{attempt}".encode(), content, call, finish)
        ids = made.ids_text(tag.prompt)
        usage = self._usage(prompt, count)
        if self._shape == "sglang":
            form = b'"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":0,"weight_version":"7"'
            triples = comma.join(made.entries(TRIPLE, tag.sampled, attempt))
            meta = [made.spelled(b']%b"meta_info":{"output_token_logprobs":[') % comma, triples, b"]", comma]
            counted = self._form(form, prompt, count)
            return [
                begun,
                made.spelled(b'"matched_stop":null,"prompt_token_ids":['),
                *ids,
                *meta,
                counted,
                b"}}]",
                comma,
                usage,
                b"}",
            ]
        contents = comma.join(made.entries(CONTENT, tag.sampled, attempt))
        sampled = [made.spelled(b'"logprobs":{"content":['), contents, made.spelled(b']},"token_ids":[')]
        rest = [b"]", comma, self._versions(count), b"}]", comma, usage, made.spelled(b',"prompt_token_ids":[')]
        return [begun, *sampled, *made.ids_text([tag.sampled]), *rest, *ids, b"]}"]

    def _stream(self, tag: Tag, attempt: int) -> list[Piece]:
        """vLLM's, in events of some words each. SGLang is asked for none: it says nothing of ids in its streams."""
        made, (first, count) = self._material, tag.sampled
        content, arguments = made.said(tag, attempt)
        deltas = [self._form(b'"content":"%b"', piece) for piece in _chunks(content)]
        if tag.calls:
            form = b'"tool_calls":[{"index":0,"id":"%b","type":"function","function":{"name":"run","arguments":""}}]'
            deltas.append(self._form(form, self._call_id(tag, attempt)))
            form = b'"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]'
            deltas += [self._form(form, piece) for piece in _chunks(arguments)]
        form = b'{"id":"%b","object":"chat.completion.chunk","created":1,"model":"m","choices":['
        begun = b"data: " + self._form(form, f"chat-{tag.name}-{attempt}".encode())
        form = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}],"prompt_token_ids":[%b]}\n\n'
        events: list[Piece] = [begun + self._form(form, b"".join(made.ids_text(tag.prompt)))]
        contents = made.entries(CONTENT, tag.sampled, attempt)
        form = b'{"index":0,"delta":{%b},"logprobs":{"content":[%b]},"finish_reason":null,"token_ids":[%b]}]}\n\n'
        ends = [count * number // len(deltas) for number in range(len(deltas) + 1)]
        for delta, (start, end) in zip(deltas, itertools.pairwise(ends), strict=True):
            ids = b"".join(made.ids_text([(first + start, end - start)]))
            events.append(begun + self._form(form, delta, made.comma.join(contents[start:end]), ids))
        form = b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"%b",%b}]}\n\n'
        events.append(begun + self._form(form, b"tool_calls" if tag.calls else b"stop", self._versions(count)))
        usage = self._usage(sum(count for _, count in tag.prompt), count)
        return [*events, begun + made.spelled(b"],") + usage + b"}\n\n", b"data: [DONE]\n\n"]

    def _completion(self, body: bytes) -> list[Piece]:
        """The reply to a prompt of ids, which it repeats."""
        made, start = self._material, body.index(b"[", body.index(b'"prompt"')) + 1
        end = body.index(b"]", start)
        prompt = memoryview(body)[start:end]
        tag = Tag.last_ids_in(bytes(prompt[-64:]))
        self._asked[tag.name] += 1
        attempt = self._asked[tag.name]
        form = b'{"id":"%b","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"%b",'
        begun = self._form(form, _rid(body) or f"cmpl-{tag.name}-{attempt}".encode(), made.said(tag, attempt)[0])
        count = tag.sampled[1]
        own = b'"matched_stop":null' if self._shape == "sglang" else self._versions(count)
        begun += self._form(b'"finish_reason":"stop",%b,"logprobs":{"token_logprobs":[', own)
        logprobs = made.comma.join(made.entries(LOGPROB, tag.sampled, attempt))
        ids: list[Piece] = [made.spelled(b']},"token_ids":['), *made.ids_text([tag.sampled])]
        ids.append(made.spelled(b'],"prompt_token_ids":['))
        usage = self._usage(body.count(b",", start, end) + 1, count)
        version = made.spelled(b',"metadata":{"weight_version":"7"}') if self._shape == "sglang" else b""
        return [begun, logprobs, *ids, prompt, b"]}]", made.comma, usage, version, b"}"]


def _rid(body: bytes) -> bytes:
    """The id that SGLang is to know the request by; empty if it has none before its messages."""
    at = body.find(b'"rid":"', 0, PARAMS)
    return body[at + 7 : body.index(b'"', at + 7)] if at >= 0 else b""


def _chunks(text: bytes) -> list[bytes]:
    """An escaped text in pieces of some words; no escape has a space in it."""
    words = text.split(b" ")
    pieces = [b" ".join(words[place : place + WORDS_A_CHUNK]) for place in range(0, len(words), WORDS_A_CHUNK)]
    return [pieces[0], *(b" " + piece for piece in pieces[1:])]


def main() -> None:
    parser = parser_with_port()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--spaced", action="store_true")
    arguments = parser.parse_args()
    material = Material(arguments.text, arguments.spaced)
    serve(Engine(arguments.shape, material).answer, arguments.port)


if __name__ == "__main__":
    main()
