"""The comparator behind `tito_session_mismatch`."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from helpers.tokenizers import after, load_prompts, needs_templates

from app.tito.prompts import Prompts

pytestmark = needs_templates

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "A long question?"},
    {"role": "assistant", "content": "An answer."},
    {"role": "user", "content": "Another one?"},
    {"role": "assistant", "content": "The last answer."},
]
ENDS = {"qwen3-2507": "<|im_end|>\n", "glm-4.5": "<|user|>\n", "llama3": "<|eot_id|>"}
FAMILIES = ("qwen3-2507", "glm-4.5", "llama3")


def whole(prompts: Prompts) -> array[int]:
    return prompts._encode(prompts._probe(prompts.findings.message_format, None, MESSAGES, False))


def replaced(prompts: Prompts, old: str, new: str) -> array[int]:
    text = prompts.decode(whole(prompts))
    assert text.count(old) == 1
    return prompts._encode(text.replace(old, new))


def kinds(prompts: Prompts, ids: array[int]) -> list[str]:
    return [found["type"] for found in prompts.mismatch(ids, MESSAGES, None, {})]


@pytest.fixture(params=FAMILIES)
def prompts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Prompts:
    return load_prompts(tmp_path_factory, request.param)


def test_a_rendering_is_itself(prompts: Prompts) -> None:
    assert prompts.mismatch(whole(prompts), MESSAGES, None, {}) == []


def test_another_spelling_is_no_difference(prompts: Prompts) -> None:
    ids = whole(prompts)
    spelled = array("i", (token for one in ids for token in split(prompts, one)))
    assert spelled != ids
    assert prompts.mismatch(spelled, MESSAGES, None, {}) == []


def split(prompts: Prompts, token: int) -> array[int]:
    text = prompts.decode([token])
    if text[:1] in ("<", "[") or "�" in text:
        return array("i", [token])
    return array("i", (one for letter in text for one in prompts._encode(letter)))


def test_what_the_policy_wrote_and_what_the_prompt_was_are_told_apart(prompts: Prompts) -> None:
    assert kinds(prompts, replaced(prompts, "An answer.", "Another answer.")) == ["assistant_text"]
    assert kinds(prompts, replaced(prompts, "The last answer.", "No answer.")) == ["assistant_text"]
    assert kinds(prompts, replaced(prompts, "A long question?", "A question?")) == ["non_assistant_text"]
    assert kinds(prompts, replaced(prompts, "Be brief.", "Be long.")) == ["non_assistant_text"]


def test_a_difference_says_where_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = load_prompts(tmp_path_factory, "qwen3-2507")
    ids = replaced(prompts, "An answer.", "A reply.")
    (found,) = prompts.mismatch(ids, MESSAGES, None, {})
    assert found["expected_text"] == "assistant\nAn answer."
    assert found["actual_text"] == "assistant\nA reply."
    start, length = found["actual_start"], found["actual_length"]
    assert prompts.decode(ids[start : start + length]) == found["actual_text"]
    start, length = found["expected_start"], found["expected_length"]
    assert prompts.decode(whole(prompts)[start : start + length]) == found["expected_text"]
    assert prompts.decode(ids[: found["actual_start"]]).endswith("<|im_start|>")


@pytest.mark.parametrize(
    ("name", "sampled"), [("qwen3-2507", "<|im_end|>"), ("glm-4.5", "<|user|>"), ("llama3", "<|eot_id|>")]
)
def test_how_the_last_generation_ended_is_no_difference(
    tmp_path_factory: pytest.TempPathFactory, name: str, sampled: str
) -> None:
    prompts = load_prompts(tmp_path_factory, name)
    tail = "" if name == "glm-4.5" else ENDS[name]
    text = prompts.decode(whole(prompts)).removesuffix(tail)
    for end in (sampled, ""):
        assert kinds(prompts, prompts._encode(text + end)) == []


def test_a_missing_message_or_another_role_is_structure(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = load_prompts(tmp_path_factory, "glm-4.5")
    other = replaced(prompts, "<|system|>", "<|observation|>")
    (found,) = prompts.mismatch(other, MESSAGES, None, {})
    assert (found["type"], found["expected_text"], found["actual_text"]) == (
        "special_token_type",
        "<|system|>",
        "<|observation|>",
    )
    (found,) = prompts.mismatch(replaced(prompts, "<|system|>", ""), MESSAGES, None, {})
    check_structure(found)


def check_structure(found: dict[str, Any]) -> None:
    assert found["type"] == "special_token_count"
    assert found["segment_index"] == -1
    assert found["detail"] == "12 segments expected, 11 found, the first difference at segment 2"
    assert found["expected_text"].startswith("[<|system|>] (")
    assert "brief" not in found["expected_text"] + found["actual_text"]


def test_reasoning_that_the_template_drops_is_the_policys(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = load_prompts(tmp_path_factory, "qwen3")
    reply = {"role": "assistant", "content": "a", "reasoning_content": "thought"}
    first = [{"role": "user", "content": "q"}]
    ids = prompts.first(first, None, {}) + prompts._encode("<think>\nthought\n</think>\n\na<|im_end|>")
    assert prompts.mismatch(ids, [*first, reply], None, {}) == []
    ids += after(prompts, ids, first).ids + prompts._encode("<think>\n\n</think>\n\nb<|im_end|>")
    messages = [*first, reply, *first, {"role": "assistant", "content": "b"}]
    assert [found["type"] for found in prompts.mismatch(ids, messages, None, {})] == ["assistant_text"]
