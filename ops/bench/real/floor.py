"""The floor: a relay without a store. It receives a request, compares it with the session's last one and its reply,
forwards it, and compares the reply's prompt with what is known."""

from __future__ import annotations

from ops.bench.client import Connection
from ops.bench.real.relay import NOT_FOUND, Reply, parser_with_port, serve

PROMPT = b'"prompt_token_ids"'


class Floor:
    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._idle: list[Connection] = []
        self._last: dict[str, tuple[bytes, bytes]] = {}

    async def answer(self, path: str, body: bytes) -> Reply:
        session, _, route = path.partition("/v1/")
        if not route:
            return Reply([b"{}"]) if path in ("/health", "/sessions") else NOT_FOUND
        connection = self._idle.pop() if self._idle else await Connection.connect(self._engine)
        response = await connection.request("POST", "/v1/" + route, body)
        self._idle.append(connection)
        if response.status != 200:
            return Reply([response.body], response.status)
        prompt = response.body.index(b"[", response.body.index(PROMPT)) + 1
        if session in self._last:
            messages, ids = self._last[session]
            if not body.startswith(messages) or not response.body.startswith(ids, prompt):
                return Reply([b"{}"], 409)
        self._last[session] = body[:-2], response.body[prompt : response.body.index(b"]", prompt)]
        return Reply([response.body])


if __name__ == "__main__":
    parser = parser_with_port()
    parser.add_argument("--engine", required=True)
    arguments = parser.parse_args()
    serve(Floor(arguments.engine).answer, arguments.port)
