"""The rule for a later turn, and what the battery finds out about a template."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from helpers.tokenizers import after, load_prompts, needs_templates
from tables import rows

from app.errors import StartupError, Unsupported
from app.tito.continuation import ContinuationRule, Extension, NotAnExtension, Stops
from app.tito.prompts import Prompts
from tests.tools.tito_check.tokenizers import save_with

END, START, USER, RESULT, SYSTEM, RETURN, OTHER = range(90, 97)
NEWLINE, CLOSE = 10, 11


def continuation(stops: list[int], roles: tuple[int, ...] = ()) -> ContinuationRule:
    known = Stops(frozenset([*stops, *roles]), frozenset(roles), frozenset(range(90, 97)))
    return ContinuationRule(lambda text: array("i", text.encode()), lambda ids: "".join(map(chr, ids)), known)


Endings = tuple["array[int]", "array[int]"]
"""What follows a message's text or its last call: if it is the last message, and if others follow."""


def endings(last: list[int], followed: list[int]) -> Endings:
    return array("i", last), array("i", followed)


CHATML = endings([END, NEWLINE], [END, NEWLINE, START, 1])
CHATML_CALL = endings([CLOSE, END, NEWLINE], [CLOSE, END, NEWLINE, START, 1])
GLM = endings([], [USER, 1])
GLM_RULE = endings([], [SYSTEM, 2, USER, 1])
BARE_RULE = endings([], [2, USER, 1])
LATER_END = endings([], [NEWLINE, USER, 1])
GLM_CALL = endings([CLOSE], [CLOSE, RESULT, 1])
HARMONY = endings([RETURN], [END, START, 1])


@pytest.mark.parametrize(
    ("stops", "roles", "rests", "called", "last", "trim", "ids"),
    [
        ([END], (), CHATML, False, END, 0, [NEWLINE, START, 1]),
        ([END], (), CHATML, False, 5, 0, [END, NEWLINE, START, 1]),
        ([END, OTHER], (), CHATML, False, OTHER, 0, [END, NEWLINE, START, 1]),
        ([], (USER, RESULT), GLM, False, USER, 0, [1]),
        ([], (USER, RESULT), GLM, False, RESULT, 1, [USER, 1]),
        ([], (USER, RESULT), GLM_RULE, False, USER, 1, [SYSTEM, 2, USER, 1]),
        ([], (USER, RESULT), BARE_RULE, False, USER, 1, [2, USER, 1]),
        ([], (USER, RESULT), LATER_END, False, USER, 0, [1]),
        ([OTHER], (USER, RESULT), GLM, False, OTHER, 0, [USER, 1]),
        ([], (USER, RESULT), GLM, False, 5, 0, [USER, 1]),
        ([], (USER, RESULT), GLM_CALL, True, RESULT, 0, [1]),
        ([], (USER, RESULT), GLM_CALL, True, USER, 1, [RESULT, 1]),
        ([], (USER, RESULT), GLM_CALL, True, 5, 0, [RESULT, 1]),
        ([END], (), CHATML_CALL, True, 5, 0, [END, NEWLINE, START, 1]),
        ([END, RETURN], (), HARMONY, False, RETURN, 1, [END, START, 1]),
        ([END, RETURN], (), HARMONY, False, 5, 0, [END, START, 1]),
    ],
    ids=[
        *("ended", "cut", "another stop token"),
        *("the next role", "another role", "a rule comes first", "bare text comes first", "a newline"),
        *("GLM, another stop token", "GLM, cut"),
        *("a call", "a call, another role", "a call, cut", "ChatML, a call, cut"),
        *("the last message ends otherwise", "gpt-oss, cut"),
    ],
)
def test_the_last_stored_token_says_what_follows(
    stops: list[int], roles: tuple[int, ...], rests: Endings, called: bool, last: int, trim: int, ids: list[int]
) -> None:
    assert continuation(stops, roles).join(*rests, last, called=called) == Extension(trim, array("i", ids))


BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.arguments.values()|list|join }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}],
}
RESULTS = [{"role": "tool", "tool_call_id": "a", "content": "seen"}]


def load(folder: Path, source: str, special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Prompts:
    return Prompts.load(str(save_with(folder / "tokenizer", source, special)))


@pytest.mark.parametrize(
    ("source", "why"),
    rows("tito_continuation_refused"),
    ids=["drops", "twice", "counts", "no special tokens", "raises", "syntax"],
)
def test_a_template_that_cannot_be_continued_stops_the_start_in_one_line(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(StartupError, match=why) as error:
        load(tmp_path, source)
    assert "\n" not in str(error.value)
    assert "turnlog" not in str(error.value).replace(str(tmp_path), "")


def test_a_template_that_counts_gets_the_real_history(tmp_path: Path) -> None:
    numbered = BARE.replace("<|im_end|>", "<|im_end|>{% if m.role == 'assistant' %}{{ loop.index }}{% endif %}")
    prompts = load(tmp_path, numbered)
    assert prompts.findings.full_history
    before = [{"role": "user", "content": "a"}, CALLING, *RESULTS]
    more = prompts.after(5, before, {"role": "assistant", "content": "b"}, [{"role": "user", "content": "c"}], None, {})
    assert prompts.decode(more.ids).startswith("<|im_end|>4")
    assert not load(
        tmp_path / "other", BARE.replace("<|im_end|>", "<|im_end|>{{ messages[0].role }}")
    ).findings.full_history


REFUSES_CALLS = CALLS.replace("[{{ c.f", "{{ raise_exception('no calls') }}[{{ c.f")
FIRST_CALL = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
NO_RESULTS = CALLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")


@pytest.mark.parametrize(
    ("source", "shape", "why"),
    [
        (REFUSES_CALLS, "a call and results", "refuses these messages: no calls"),
        (FIRST_CALL, "several calls and results", "leaves a part of the message out"),
        (NO_RESULTS, "a call and results", "leaves a part of it out"),
    ],
    ids=["no calls", "only the first call", "no results"],
)
def test_what_a_template_cannot_render_is_refused_by_name(tmp_path: Path, source: str, shape: str, why: str) -> None:
    prompts = load(tmp_path, source)
    assert why in prompts.findings.refused[shape]
    assert after(prompts, [5], [{"role": "user", "content": "c"}], TOOLS).trim == 0
    answer = CALLING if shape.startswith("a call") else {**CALLING, "tool_calls": CALLING["tool_calls"] * 2}
    results = RESULTS if shape.startswith("a call") else RESULTS * 2
    with pytest.raises(NotAnExtension, match=f"{shape}.*: .*{why}"):
        after(prompts, [5], results, TOOLS, answer=answer)


def test_tools_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="does not render tools"):
        load(tmp_path, BARE).first([{"role": "user", "content": "a"}], TOOLS, {})


HOISTS = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + BARE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
)


def test_a_message_that_moves_into_the_history_is_no_extension(tmp_path: Path) -> None:
    prompts = load(tmp_path, HOISTS)
    with pytest.raises(NotAnExtension, match="renders the earlier messages differently") as error:
        after(prompts, [5], [{"role": "system", "content": "secret"}, {"role": "user", "content": "c"}])
    assert "secret" not in str(error.value)


class Clock:
    """Stands where `transformers` asks for the date."""

    day = "Monday"

    @classmethod
    def now(cls) -> Clock:
        return cls()

    def strftime(self, _: str) -> str:
        return self.day


def test_a_template_that_writes_the_date_goes_on_after_midnight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    prompts = load(tmp_path, "{{ strftime_now('%A') }}" + BARE)
    new = [{"role": "user", "content": "c"}]
    today = after(prompts, [5], new)
    monkeypatch.setattr(Clock, "day", "Tuesday")
    assert after(prompts, [5], new) == today


@needs_templates
def test_gpt_oss_ends_messages_in_the_middle_otherwise(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = load_prompts(tmp_path_factory, "gpt-oss")
    assert prompts.max_trim_tokens == 1
    more = after(prompts, prompts._encode("<|return|>"), [{"role": "user", "content": "c"}])
    assert (more.trim, prompts.decode(more.ids)) == (1, "<|end|><|start|>user<|message|>c<|end|><|start|>assistant")


@needs_templates
def test_a_second_round_of_results_opens_no_block(tmp_path_factory: pytest.TempPathFactory) -> None:
    """DeepSeek V3 writes the beginning of the block of results once."""
    prompts = load_prompts(tmp_path_factory, "deepseek-v3")
    asked = [{"role": "user", "content": "Look."}]
    last = prompts._encode("<｜end▁of▁sentence｜>")[-1]
    first = prompts.after(last, asked, CALLING, RESULTS, None, {})
    assert prompts.decode(first.ids).startswith("<｜tool▁outputs▁begin｜>")
    second = prompts.after(last, [*asked, CALLING, *RESULTS], CALLING, RESULTS, None, {})
    assert prompts.decode(second.ids).startswith("<｜tool▁output▁begin｜>")


@needs_templates
def test_tools_that_a_late_system_message_shows_again_are_no_extension(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    prompts = load_prompts(tmp_path_factory, "muse")
    new = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "c"}]
    with pytest.raises(NotAnExtension, match="renders the tools again"):
        after(prompts, prompts._encode("<|eot|>"), new, TOOLS)
    assert after(prompts, prompts._encode("<|eot|>"), new[1:], TOOLS).trim == 0
