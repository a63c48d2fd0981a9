"""Prompts on real templates: equal to a whole rendering, arguments, errors, threads."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizers import after, load_prompts, needs_templates, tokenizer_folder

from app.errors import InvalidRequest, StartupError, Unsupported
from app.tito.prompts import Prompts
from tests.tools.tito_check.tokenizers import load, save_with

pytestmark = needs_templates

CHATML = ("qwen2.5", "qwen3", "qwen3-2507", "qwen3.5", "qwen3.6", "qwen3.8")
ALL = (*CHATML, "glm-4.5", "llama3")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TOOL_LESS = ("llama3",)
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look at it."}]
LONE: str = json.loads('"\\ud800"')


@pytest.fixture(params=ALL)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prompts(tmp_path_factory: pytest.TempPathFactory, family: str) -> Prompts:
    return load_prompts(tmp_path_factory, family)


def qwen3(factory: pytest.TempPathFactory) -> Prompts:
    return load_prompts(factory, "qwen3")


def answered(prompts: Prompts, text: str, end: str) -> array[int]:
    return prompts.first(QUESTION, TOOLS, {}) + prompts._encode(text + end)


def test_a_prompt_is_int32_and_the_tokenizers_own_rendering(
    tmp_path_factory: pytest.TempPathFactory, prompts: Prompts, family: str
) -> None:
    tokenizer = load(tokenizer_folder(tmp_path_factory, family))
    ids = prompts.first(QUESTION, None, {})
    assert ids.itemsize == 4
    pinned = {"preserve_thinking": True} if family in ("qwen3.6", "qwen3.8") else {}
    rendering = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False, **pinned
    )
    assert ids.tolist() == rendering
    assert prompts.decode(ids) == tokenizer.decode(rendering)


@pytest.mark.parametrize("text", ["The answer is (", "It is ", " a", "\n"])
def test_a_replys_beginning_is_cut_as_transformers_cuts_it_or_refused(
    tmp_path_factory: pytest.TempPathFactory, prompts: Prompts, family: str, text: str
) -> None:
    """vLLM asks transformers; SGLang splices the text in, whatever the template makes of it."""
    spliced = prompts.beginning(text, {}, is_spliced=True)
    assert prompts.decode(spliced) == text
    try:
        ids = prompts.first(QUESTION, None, {}) + prompts.beginning(text, {}, is_spliced=False)
    except Unsupported:
        assert family not in ("qwen2.5", "qwen3-2507") or not text.strip()
        return
    tokenizer = load(tokenizer_folder(tmp_path_factory, family))
    pinned = {"preserve_thinking": True} if family in ("qwen3.6", "qwen3.8") else {}
    begun = [*QUESTION, {"role": "assistant", "content": text}]
    assert ids.tolist() == tokenizer.apply_chat_template(
        begun, continue_final_message=True, tokenize=True, return_dict=False, **pinned
    )


@pytest.mark.parametrize(
    ("name", "before", "now", "rewrites"),
    [
        ("qwen3", {}, {"enable_thinking": False}, False),
        ("qwen3", {"enable_thinking": True}, {"unknown": 1}, False),
        ("qwen3.5", {"enable_thinking": False}, {"enable_thinking": True}, False),
        ("qwen3.8", {"enable_thinking": False}, {"enable_thinking": True}, True),
        ("qwen3.8", {}, {"reasoning_effort": "low"}, True),
        ("glm-4.5", {}, {"enable_thinking": False}, True),
        ("llama3", {}, {"enable_thinking": False}, False),
    ],
)
def test_arguments_that_render_history_otherwise_are_told_from_those_that_do_not(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    rewrites: bool,
) -> None:
    prompts = load_prompts(tmp_path_factory, name)
    for tools in (None,) if name in TOOL_LESS else (None, TOOLS):
        assert prompts.rewrites_history(before, now, tools) is rewrites
        assert prompts.rewrites_history(now, now, tools) is False


def test_what_is_not_a_clients_to_set_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = load_prompts(tmp_path_factory, "qwen3.6")
    prompts.check_arguments({"enable_thinking": False, "preserve_thinking": True})
    for name in ("tokenize", "add_generation_prompt", "messages", "tools", "chat_template", "return_dict", "return_x"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name} is set by the server"):
            prompts.check_arguments({name: True})
    for value in (False, 1, None):
        with pytest.raises(InvalidRequest, match="preserve_thinking is always true"):
            prompts.check_arguments({"preserve_thinking": value})
    with pytest.raises(InvalidRequest, match="must be an object"):
        prompts.check_arguments([])
    qwen3(tmp_path_factory).check_arguments({"preserve_thinking": False})


def test_pinned_arguments_keep_earlier_reasoning(tmp_path_factory: pytest.TempPathFactory) -> None:
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "a", "reasoning_content": "earlier"},
        {"role": "user", "content": "b"},
    ]
    for name, kept in (("qwen3.5", False), ("qwen3.6", True), ("qwen3.8", True)):
        prompts = load_prompts(tmp_path_factory, name)
        assert ("earlier" in prompts.decode(prompts.first(messages, None, {}))) is kept


def test_errors_hold_no_content(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = load_prompts(tmp_path_factory, "qwen3.5")
    stored = answered(prompts, "Yes", "<|im_end|>")
    system = [{"role": "system", "content": "secret"}]
    with pytest.raises(InvalidRequest, match=r"refuses these messages: System message must be at the beginning\.$"):
        after(prompts, stored, system)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "secret"}}
    injected = [{"role": "assistant", "content": "", "tool_calls": [call]}, *QUESTION[1:]]
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]: tool call 0: arguments must be the JSON of an object"):
        after(prompts, stored, injected)
    with pytest.raises(InvalidRequest, match=r"cannot render these messages \(\w+\)$"):
        prompts.first([*QUESTION, *injected], None, {}, stored=4)
    small = load_prompts(tmp_path_factory, "qwen3.8")
    with pytest.raises(InvalidRequest, match=r"cannot render these messages \(TemplateError\)$"):
        small.first(QUESTION, None, {"reasoning_effort": "secret"})
    with pytest.raises(InvalidRequest, match=r"\(TemplateError\)$"):
        small.rewrites_history({}, {"reasoning_effort": "secret"}, None)


def test_sglang_makes_a_question_of_a_last_answer_and_vllm_does_not(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = qwen3(tmp_path_factory)
    answer = {"role": "assistant", "content": "I would", "reasoning_content": "Hm."}
    asked = prompts.first([*QUESTION, {"role": "user", "content": "I would"}], None, {})
    assert prompts.first([*QUESTION, answer], None, {}) == asked
    assert prompts.first([*QUESTION, answer], None, {}, stored=3) != asked
    assert prompts.first([*QUESTION, answer], None, {}, "vllm") != asked


def test_images_and_lone_surrogates_are_refused(prompts: Prompts) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(Unsupported, match=r"messages\[1\]: content part 0"):
        prompts.first([QUESTION[1], image], None, {})
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        prompts.first([{"role": "user", "content": LONE}], None, {})
    tools = [{"type": "function", "function": {"name": LONE}}]
    with pytest.raises(InvalidRequest, match=r"lone surrogate|does not render tools"):
        prompts.first(QUESTION, tools, {})


def test_two_threads_get_what_one_gets(prompts: Prompts, family: str) -> None:
    every = None if family in TOOL_LESS else TOOLS
    stored = prompts.first(QUESTION, every, {})

    def work(number: int) -> list[int]:
        new = [{"role": "user", "content": f"question {number} " * 20}]
        tools = every if number % 2 else None
        arguments = {"enable_thinking": number % 3 == 0}
        return [*prompts.first(new, tools, arguments), *after(prompts, stored, new, tools, arguments).ids]

    alone = [work(number) for number in range(60)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(60))) == alone


@pytest.mark.parametrize("package", ["transformers", "jinja2"])
def test_a_package_that_is_not_there_stops_the_start(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_with(tmp_path / "t", "{{ messages }}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StartupError, match=f"TURNLOG_TOKENIZER needs the package {package}: pip install"):
        Prompts.load(str(folder))


def test_a_tokenizer_without_a_template_stops_the_start(tmp_path: Path) -> None:
    folder = save_with(tmp_path / "t", "{{ messages }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"has no chat template$"):
        Prompts.load(str(folder))
