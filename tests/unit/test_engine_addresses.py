"""What Turnlog answers at each route of the engines."""

from __future__ import annotations

from tests.tools.engine_routes import TABLE, answers


def test_each_route_of_an_engine_is_answered_as_the_table_says() -> None:
    """The table has all routes of SGLang 0.5.23 and vLLM 0.32: `python -m tests.tools.engine_routes` makes it."""
    known = answers()
    for line in TABLE.read_text().splitlines():
        method, path, rest = line.split(maxsplit=2)
        answer = " ".join(word for word in rest.split() if word not in ("sglang", "vllm"))
        assert known.get((path, method), "404") == answer, line
