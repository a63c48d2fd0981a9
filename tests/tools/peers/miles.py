"""`python -m tests.tools.peers.miles <checkout of radixark/miles>`: miles' tests of its session server over HTTP, with
Turnlog in its place.

The tests and their engine are those of the checkout. Where they start a `SessionServer`, Turnlog starts on that port,
with the settings that stand for the server's arguments. PyTorch, Ray and SGLang need not be installed: what the tests
import of them is absent, but for the names that their engine and driver use.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import httpx
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import RootModel

from ops.server import ServerProcess
from tests.tools.peers.outcomes import forget_our_tests, run
from tests.tools.tito_check import tokenizers

MODULES = (
    "test_sessions",
    "test_sessions_v1_pins",
    "test_sessions_v2",
    "test_session_race_conditions",
    "test_session_pretokenized_e2e",
    "test_session_v1_v2_parity",
)
"""In `tests/fast/router`: those that speak HTTP."""

ABSENT = ("sglang", "torch", "ray", "sglang_router", "megatron", "miles_plugins", "sympy", "pylatexenc", "datasets")


class Absent(types.ModuleType):
    """A package that is not installed. Whatever is imported from it is a mock."""

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the packages in `ABSENT`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sglang.srt.entrypoints.openai.protocol":
            vars(module).update(Tool=Tool, ChatCompletionRequest=ChatFields)
        if module.__name__ == "sglang.srt.function_call.function_call_parser":
            vars(module)["FunctionCallParser"] = CallParser


class Tool(RootModel[dict[str, Any]]):
    """SGLang's model of a tool, which adds a field to what it is given."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {**self.root, "defer_loading": None}


class ChatFields:
    """SGLang's model of a chat, of which the driver reads the names."""

    model_fields: ClassVar[dict[str, Any]] = dict(CompletionCreateParamsBase.__annotations__)


class CallParser:
    """Calls as Qwen 2.5 writes them: an object between `<tool_call>` and `</tool_call>`."""

    _CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)

    def __init__(self, tools: Sequence[Tool], tool_call_parser: str) -> None:
        self._names = [tool.root["function"]["name"] for tool in tools]

    def parse_non_stream(self, text: str) -> tuple[str, list[types.SimpleNamespace]]:
        found = [json.loads(call) for call in self._CALL.findall(text)]
        calls = [
            types.SimpleNamespace(
                name=call["name"],
                parameters=json.dumps(call.get("arguments", {}), ensure_ascii=False),
                tool_index=self._names.index(call["name"]) if call["name"] in self._names else -1,
            )
            for call in found
        ]
        return text.partition("<tool_call>")[0].rstrip() if calls else text, calls


class Place:
    """In place of miles' `SessionServer`: says which settings Turnlog is started with."""

    tokenizer: Path

    def __init__(self, args: Any, backend_url: str) -> None:
        self.app = self
        self.backend_url = backend_url
        self.template = getattr(args, "chat_template_path", None)
        payloads = ["routed_experts"] if getattr(args, "use_rollout_routing_replay", False) else []
        payloads += ["indexer_topk"] if getattr(args, "use_rollout_indexer_replay", False) else []
        is_tree = getattr(args, "use_session_server", None) == "v2"
        adds_rows = getattr(args, "pause_generation_mode", None) == "in_place"
        self.environment = {
            "TURNLOG_UPSTREAM_DIALECT": "sglang",
            "TURNLOG_REPLAY": ",".join(payloads),
            "TURNLOG_REPLAY_INCREMENTAL": str(adds_rows).lower(),
            "TURNLOG_MOE_LAYERS": "1",
            "TURNLOG_MOE_TOPK": "1",
            "TURNLOG_HISTORY": "tree" if is_tree else "linear",
        }

    def tokenizer_in(self, folder: Path) -> Path:
        """The tokenizer with the template that the test names."""
        if self.template is None:
            return self.tokenizer
        copy = Path(shutil.copytree(self.tokenizer, folder / "tokenizer"))
        (copy / "chat_template.jinja").write_text(Path(self.template).read_text())
        return copy


class Starter:
    """In place of miles' `UvicornThreadServer`: starts Turnlog for a `Place`, and anything else as that does."""

    plain: Any
    engines: ClassVar[list[Any]] = []

    def __init__(self, app: Any, host: str, port: int) -> None:
        self.app, self.host, self.port = app, host, port
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._server: Any = None
        if isinstance(app, Place):
            folder, engines = Path(self._folder.name), [app.backend_url]
            settings = {**app.environment, "TURNLOG_TOKENIZER": str(app.tokenizer_in(folder))}
            self._server = ServerProcess(folder, upstreams=engines, environment=settings, port=port).migrate()
        else:
            self._server = self.plain(app, host, port)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Start, and have Turnlog ask its engine what it reads: the tests count the requests that follow."""
        self._server.start()
        if not isinstance(self.app, Place):
            return
        created = httpx.post(f"{self.url}/sessions").json()
        httpx.post(
            self.url + created["base_url"] + "/chat/completions", json={"messages": [{"role": "user", "content": "-"}]}
        )
        for engine in self.engines:
            if engine.url == self.app.backend_url:
                engine.reset_stats()

    def stop(self) -> None:
        self._server.stop()
        self._folder.cleanup()


def completed(reply: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's reply with what SGLang says and their mock leaves out: without it Turnlog refuses the reply."""
    for choice in reply.get("choices", ()):
        meta, prompt = choice["meta_info"], choice.get("prompt_token_ids") or []
        rows = [[row[0], row[1], None] for row in meta["output_token_logprobs"]]
        reply["usage"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(rows),
            "total_tokens": len(prompt) + len(rows),
        }
        for payload in ("routed_experts", "indexer_topk"):  # Not of the shape that belongs to the tokens.
            meta.pop(payload, None)
        if request.get("return_routed_experts"):
            start = request.get("routed_experts_start_len", 0)
            meta["routed_experts"] = [[[0]]] * (len(prompt) + len(rows) - 1 - start)
        finish = {"type": "stop" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]}
        choice["meta_info"] = {
            "finish_reason": finish,
            **meta,
            "prompt_tokens": len(prompt),
            "output_token_logprobs": rows,
        }
    return reply


def remembered(engine: Any) -> None:
    """Have an engine's class note its instances for `Starter`."""
    plain = engine.__init__

    def noted(own: Any, *given: Any, **named: Any) -> None:
        plain(own, *given, **named)
        Starter.engines.append(own)

    engine.__init__ = noted


def prepare(checkout: Path, folder: Path) -> None:
    """Make the checkout's modules importable, and put Turnlog in place of its server."""
    sys.meta_path.insert(0, AbsentFinder())
    sys.path.insert(0, str(checkout))
    forget_our_tests()
    path = tokenizers.save(folder, "qwen3")
    Place.tokenizer = path

    def load(name: str, chat_template_path: str | None = None, **_: Any) -> Any:
        tokenizer = tokenizers.load(path)
        if chat_template_path is not None:
            tokenizer.chat_template = Path(chat_template_path).read_text()
        return tokenizer

    processing: Any = Absent("miles.utils.processing_utils")
    processing.load_tokenizer = load
    sys.modules[processing.__name__] = processing
    threads: Any = importlib.import_module("miles.utils.test_utils.uvicorn_thread_server")
    Starter.plain, threads.UvicornThreadServer = threads.UvicornThreadServer, Starter
    engine: Any = importlib.import_module("miles.utils.test_utils.mock_sglang_server").MockSGLangServer
    handle = engine._handle_generate_like_request
    engine._handle_generate_like_request = lambda own, request, compute: handle(
        own, request, lambda payload: completed(compute(payload), payload)
    )
    remembered(engine)
    server: Any = types.ModuleType("miles.rollout.session.server")
    server.SessionServer = Place
    sys.modules[server.__name__] = server
    remembered(importlib.import_module("tests.fast.router.session_pretokenized_test_utils").ScriptedChatBackend)


def main() -> int:
    checkout, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(checkout).resolve(), Path(folder))
        files = [str(Path(checkout) / "tests" / "fast" / "router" / f"{name}.py") for name in MODULES]
        run(files, checkout, options, importlib.import_module("tests.fast.router.conftest"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
