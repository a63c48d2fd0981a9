"""`python -m tests.tools.engine_routes --sglang FOLDER --vllm FOLDER`: every route of the two engines, and what Turnlog
answers there.

The folders are those of the unpacked packages; their sources are read, not run. What is printed is
`engine_routes.txt`, which a test compares with the application.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from app.api.openapi import document
from app.features.gates import engine_routes
from app.main import create_app
from app.protocols.registry import ROUTES
from app.settings import Settings

TABLE = Path(__file__).with_suffix(".txt")

SOURCES = {
    "sglang": ("srt/entrypoints/http_server.py", "srt/entrypoints/v1_loads.py", "srt/entrypoints/elastic_ep.py"),
    "vllm": tuple(
        f"entrypoints/{room}/**/*.py"
        for room in ("openai", "anthropic", "generate", "pooling", "rl", "scale_out", "serve", "speech_to_text")
    ),
}
METHODS = ("get", "post", "put", "delete")

ANSWERS: Mapping[object, str] = {
    engine_routes.pass_on: "one engine",
    engine_routes.pause: "gate, all engines",
    engine_routes.pause_generation: "gate, all engines",
    engine_routes.resume: "gate, all engines",
    engine_routes.change: "gate, all engines",
    engine_routes.abort_request: "by id",
    engine_routes.abort_requests: "by id",
    engine_routes.refuse: "refused by name",
}


def answers() -> Mapping[tuple[str, str], str]:
    """By path and method, what becomes of a request: a value of ANSWERS, `a turn`, or `Turnlog`."""
    app = create_app(Settings(workers=1))
    documented = document(app.table, app.release)["paths"]
    known = {(_plain(path), method.upper()): "Turnlog" for path in documented for method in documented[path]}
    for path, protocol in ROUTES.items():
        known |= dict.fromkeys(((path, method) for method in protocol.methods), "a turn")
    for route in engine_routes.route.entries:
        answer = ANSWERS.get(route.endpoint, "Turnlog")
        known |= {(route.path, method): answer for method in route.methods}
    return known


def _plain(path: str) -> str:
    """The path without the names of what varies in it."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def routes_of(folder: Path, engine: str) -> Iterator[tuple[str, str]]:
    """Method and path of each route in an engine's sources."""
    for pattern in SOURCES[engine]:
        for path in sorted(folder.glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    yield from _routes_in(node, node.func.attr)


def _routes_in(call: ast.Call, name: str) -> Iterator[tuple[str, str]]:
    first = call.args[0]
    if isinstance(first, ast.Call) and len(first.args) == 2:
        first = first.args[1]  # os.environ.get(name, the usual path)
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("/")):
        return
    if name in METHODS and not (name == "get" and ast.unparse(call.func) == "os.environ.get"):
        yield name.upper(), first.value
    elif name in ("api_route", "add_api_route"):
        [methods] = [keyword.value for keyword in call.keywords if keyword.arg == "methods"]
        for method in ast.literal_eval(methods):
            yield method, first.value


def lines(folders: Mapping[str, Path]) -> Iterator[str]:
    engines: dict[tuple[str, str], set[str]] = defaultdict(set)
    for engine, folder in folders.items():
        for method, path in routes_of(folder, engine):
            engines[_plain(path), method].add(engine)
    known = answers()
    for (path, method), names in sorted(engines.items()):
        yield f"{method:6} {path:44} {' '.join(sorted(names)):11} {known.get((path, method), '404')}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Every route of SGLang and vLLM, and what Turnlog answers there.")
    for engine in SOURCES:
        parser.add_argument(f"--{engine}", type=Path, required=True, help="the folder of its unpacked package")
    print("\n".join(lines(vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
