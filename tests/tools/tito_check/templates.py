"""Public chat templates, read from packages where they lie; none is kept here.

`trl` is installed with the test packages. Folders hold `.jinja` files, or archives as `pip download` leaves them: the
wheel of `xinference` (`llm_family.json`) and the sdist of `llama-cpp-python` (`vendor/llama.cpp/models/templates`).
"""

from __future__ import annotations

import importlib.util
import json
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def every(folder: Path | None) -> dict[str, str]:
    """Templates by name, each once."""
    found: dict[str, str] = {}
    for name, source in [*trl(), *(_of_folder(folder) if folder is not None else ())]:
        if source.strip() not in map(str.strip, found.values()):
            found[name] = source
    return found


def trl() -> Iterator[tuple[str, str]]:
    """Those of the installed package; its variants for training mark an assistant's text and render the same."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return
    for path in sorted((Path(spec.submodule_search_locations[0]) / "chat_templates").glob("*.jinja")):
        if not path.stem.endswith("_training"):
            yield f"trl/{path.stem}", path.read_text()


def _of_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".jinja":
            yield f"{folder.name}/{path.stem}", path.read_text()
        elif path.suffix == ".whl":
            yield from _of_wheel(path)
        elif path.name.endswith(".tar.gz"):
            yield from _of_sdist(path)


def _of_wheel(path: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(path) as wheel:
        for member in wheel.namelist():
            if PurePosixPath(member).name == "llm_family.json":
                for family in json.loads(wheel.read(member)):
                    if family.get("chat_template"):
                        yield f"xinference/{family['model_name']}", family["chat_template"]


def _of_sdist(path: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(path) as sdist:
        for member in sdist:
            name = PurePosixPath(member.name)
            if name.suffix == ".jinja" and name.parent.name == "templates":
                content = sdist.extractfile(member)
                assert content is not None
                yield f"llama.cpp/{name.stem}", content.read().decode()
