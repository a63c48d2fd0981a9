"""SGLang with the scripted scheduler: `python -m tests.tools.real_sglang.serve --model-path FOLDER …`.

Its HTTP application, OpenAI serving, parsers, tokenizer manager and detokenizer are the published ones. It runs in
SGLang's environment. The processes that SGLang spawns import this file again, and get its stand-ins; a `__main__.py`
they would not import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_NOT_INSTALLED = ("torchvision",)
"""What SGLang imports and a text model does not call; the builds on PyPI want CUDA."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is not installed, behind all other finders: an installed package wins."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _NOT_INSTALLED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__, module.__version__ = spec, [], spec.name, "0"
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.append(StandIns())


def main() -> None:
    from sglang.srt.entrypoints.http_server import launch_server  # after the stand-ins
    from sglang.srt.server_args import prepare_server_args

    from tests.tools.real_sglang.scheduler import run_scheduler_process

    launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler_process)


if __name__ == "__main__":
    main()
