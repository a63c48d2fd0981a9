"""The simulator's tokenizer as a Hugging Face folder: `transformers` renders and encodes what the simulator does."""

from __future__ import annotations

import base64
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.simulator.template import Template
from ops.simulator.tokenizer import IM_END, IMAGE_PAD, Tokenizer

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    "hello there",
    "  padded \n\n",
    "Zürich 東京 🚀👩‍🔬",
    "<|im_end|> and <think> inside",
    "a\tb\n\n\n c",
    "",
    "\u0000\u2028x",
    "e\u0301 مرحبا",
    '{"a": "<b> & \'c\'"}',
    "{{ braces }} {% raw %}",
    "back\\slash \\n 'quoted' \"twice\"",
]
ARGUMENTS: list[Any] = [
    '{"query":"ü","n":1e3}',
    "{ }",
    "not JSON",
    "",
    {},
    {"query": "Zürich <b>", "nested": {"on": True, "none": None, "list": [1, 2.5, "x"]}},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search_files",
            "description": "Finds files — even “odd” & <small> ones.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string", "minLength": 3}}},
        },
    },
    {"type": "function", "function": {"name": "zählen 🚀", "strict": False, "parameters": {"enum": [1, 2.5, None]}}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("tokenizer") / "deep"
    subprocess.run([sys.executable, "-m", "ops.simulator.tokenizer_files", str(made)], cwd=ROOT, check=True)
    return made


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(Tokenizer())


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def content(rng: random.Random) -> Any:
    text = rng.choice(TEXTS)
    if rng.random() < 0.2:
        return [{"type": "text", "text": text}, {"type": "image"}, {"type": "text", "text": rng.choice(TEXTS)}]
    return text


def call(rng: random.Random) -> dict[str, Any]:
    function = {"name": rng.choice(["search_files", "zählen 🚀"]), "arguments": rng.choice(ARGUMENTS)}
    return {"id": "c", "type": "function", "function": function}


def assistant(rng: random.Random) -> dict[str, Any]:
    """Its text begins with no white space: that seam is the one thing the two treat differently."""
    texts = [text.lstrip() for text in TEXTS]
    message: dict[str, Any] = {"role": "assistant", "content": rng.choice([*texts, None])}
    if rng.random() < 0.4:
        message["reasoning_content"] = rng.choice([*TEXTS, None])
    if rng.random() < 0.5:
        message["tool_calls"] = rng.choice([None, [], [call(rng)], [call(rng), call(rng)]])
    return message


def png(width: int, height: int) -> str:
    """The beginning of one, as a data URL."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return f"data:image/png;base64,{base64.b64encode(header).decode()}"


def conversation(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": content(rng)})
    for _ in range(rng.randint(1, 6)):
        messages.append({"role": rng.choice(["user", "user", "system"]), "content": content(rng)})
        messages.append(assistant(rng))
        messages += [{"role": "tool", "content": content(rng)} for _ in range(rng.randint(0, 3))]
    return messages[: rng.randint(1, len(messages))]


def ours(template: Template, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    raw = [msgspec.Raw(msgspec.json.encode(message)) for message in messages]
    return template.prompt(template.read(raw, msgspec.Raw(msgspec.json.encode(tools)))).ids()


def theirs(loaded: Any, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    ids: list[int] = loaded.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


@pytest.mark.parametrize("block", range(6))
def test_random_conversations_have_the_same_ids(template: Template, loaded: Any, block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        messages = conversation(seed)
        tools = [None, TOOLS, TOOLS[:1]][seed % 3]
        assert theirs(loaded, messages, tools) == ours(template, messages, tools), f"conversation {seed}"


def test_the_loaded_tokenizer_knows_its_specials(template: Template, loaded: Any) -> None:
    special = template.tokenizer.special_ids
    assert loaded.eos_token_id == special[IM_END]
    assert {name: loaded.convert_tokens_to_ids(name) for name in special} == special
    assert loaded.encode("Zürich 🚀<|im_end|>", add_special_tokens=False) == template.tokenizer.ids(
        "Zürich 🚀<|im_end|>"
    )


@pytest.mark.parametrize(
    ("url", "count"),
    [
        (png(56, 84), 6),
        (png(1 << 30, 1 << 30), 1280),
        ("data:image/png;base64,AAAA", 1),
        ("data:image/png;base64," + "=" * 40, 1),
        ("http://127.0.0.1/a.png", 1),
    ],
)
def test_an_image_is_as_many_placeholders_as_its_size(template: Template, url: str, count: int) -> None:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    ids = ours(template, [{"role": "user", "content": parts}], None)
    assert ids.count(template.tokenizer.special_ids[IMAGE_PAD]) == count
