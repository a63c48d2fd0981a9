"""How new ids join stored ones, and what is read off templates."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from helpers.tokenizers import needs_templates

from app.errors import StartupError
from app.tito.extension import Extension, NotAnExtension
from app.tito.junction import Junction
from app.tito.prompts import Prompts
from tests.tools.tito_check.tokenizers import save_with, template

END, NEWLINE, START, USER, OBSERVATION, OTHER = 90, 10, 91, 92, 93, 99

CHATML = Junction("<|im_end|>\n", array("i", [END, NEWLINE]), frozenset(), array("i", [START, 5]), frozenset([START]))
ROLES = Junction("", array("i"), frozenset([USER, OBSERVATION]), array("i", [94]), frozenset([USER, OBSERVATION, 94]))
NEW = [START, 1, 2]

BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("stored", "ids"),
    [
        ([1, END], [NEWLINE, *NEW]),
        ([1, END, NEWLINE], NEW),
        ([1, 2], [END, NEWLINE, *NEW]),
        ([1, NEWLINE], [END, NEWLINE, *NEW]),
        ([1, OTHER], [END, NEWLINE, *NEW]),
        ([END], [NEWLINE, *NEW]),
    ],
    ids=["ended", "ended and went on", "cut", "cut at a newline", "other stop", "short"],
)
def test_what_of_the_tail_was_sampled_is_not_repeated(stored: list[int], ids: list[int]) -> None:
    joined = CHATML.join(array("i", stored), array("i", [END, NEWLINE, *NEW]))
    assert joined == Extension(0, array("i", ids))


@pytest.mark.parametrize(
    ("stored", "trim", "ids"),
    [
        ([1, USER], 0, [7, 8]),
        ([1, OBSERVATION], 1, [USER, 7, 8]),
        ([1, 2], 0, [USER, 7, 8]),
        ([1, OTHER], 0, [USER, 7, 8]),
        ([USER, 1], 0, [USER, 7, 8]),
    ],
    ids=["the same role", "another role", "cut", "other stop", "a role before"],
)
def test_a_sampled_role_token_stays_or_is_trimmed(stored: list[int], trim: int, ids: list[int]) -> None:
    assert ROLES.join(stored, array("i", [USER, 7, 8])) == Extension(trim, array("i", ids))
    assert ROLES.max_trim_tokens == 1


def load(folder: Path, source: str, special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Prompts:
    return Prompts.load(str(save_with(folder / "tokenizer", source, special, ())), "auto")


def test_an_own_template_works_by_derivation(tmp_path: Path) -> None:
    prompts = load(tmp_path, BARE)
    ids = prompts.first([{"role": "user", "content": "a"}], None, {})
    reply = prompts.first([{"role": "user", "content": "b"}], None, {})[:1]  # ends without an end token
    more = prompts.after([*ids, *reply], [{"role": "user", "content": "c"}], None, {})
    assert more.trim == 0
    assert prompts.decode(more.ids) == "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (BARE.replace("m.content", "'x'"), "does not render an assistant message's content once"),
        (BARE.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), "content once"),
        (BARE.replace("{{ m.role }}", "{{ m.role }}{{ messages|length }}"), "otherwise once others follow"),
        (BARE.replace("{{ m.role }}", "{{ m.role }}{{ loop.index }}"), "otherwise once others follow"),
        (BARE.replace("<|im_end|>", "{{ '<|end|>' if loop.last else '<|im_end|>' }}"), "once another follows"),
        (BARE.replace("<|im_end|>\n", "\n\n").replace("<|im_start|>", "# "), "does not end with a special token"),
        (BARE.replace("<|im_end|>\n", "").replace("<|im_start|>", "# "), "special token"),
        (BARE.replace("{{ m.role }}", "{{ raise_exception('never') }}"), "refuses these messages: never"),
        ("{% if %}", "not Jinja"),
    ],
    ids=["drops", "twice", "counts", "numbers", "last", "plain end", "plain start", "raises", "syntax"],
)
def test_a_template_without_a_junction_stops_the_start_in_one_line(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(StartupError, match=why) as error:
        load(tmp_path, source)
    assert "\n" not in str(error.value)
    assert "turnlog" not in str(error.value).replace(str(tmp_path), "")


CALLED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}[call {{ c.function.name }}]{% endfor %}{% endif %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_results_are_rendered_behind_a_call_where_the_template_wants_one(tmp_path: Path) -> None:
    prompts = load(tmp_path, CALLED)
    ids = prompts.first([{"role": "user", "content": "a"}], None, {})
    new = [{"role": "tool", "content": "r", "tool_call_id": "c"}]
    text = prompts.decode(prompts.after(ids, new, None, {}).ids)
    assert text == "<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"


def test_results_that_show_their_calls_name_stop_the_start(tmp_path: Path) -> None:
    named = CALLED.replace(
        "{% if m.role == 'tool' and",
        "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].tool_calls[0].function.name }}"
        "{% endif %}{% if m.role == 'tool' and",
    )
    with pytest.raises(StartupError, match="by the name of the call"):
        load(tmp_path, named)


HOISTS = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + BARE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
)


def test_a_message_that_moves_into_the_history_is_no_extension(tmp_path: Path) -> None:
    prompts = load(tmp_path, HOISTS)
    ids = prompts.first([{"role": "user", "content": "a"}], None, {})
    with pytest.raises(NotAnExtension, match="renders the messages before these otherwise") as error:
        prompts.after(ids, [{"role": "system", "content": "secret"}, {"role": "user", "content": "c"}], None, {})
    assert "secret" not in str(error.value)


LATE_TOOLS = BARE.replace(
    "<|im_start|>{{ m.role }}", "{% if tools and loop.last %}[tools]{% endif %}<|im_start|>{{ m.role }}"
)


def test_tools_that_move_with_the_last_message_are_no_extension(tmp_path: Path) -> None:
    prompts = load(tmp_path, LATE_TOOLS)
    tools = [{"type": "function", "function": {"name": "f"}}]
    ids = prompts.first([{"role": "user", "content": "a"}], tools, {})
    with pytest.raises(NotAnExtension, match="otherwise once others follow"):
        prompts.after(ids, [{"role": "user", "content": "c"}], tools, {})
    assert prompts.after(ids, [{"role": "user", "content": "c"}], None, {}).trim == 0


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
    ids = prompts.first([{"role": "user", "content": "a"}], None, {})
    new = [{"role": "user", "content": "c"}]
    today = prompts.after(ids, new, None, {})
    monkeypatch.setattr(Clock, "day", "Tuesday")
    assert prompts.after(ids, new, None, {}) == today


@needs_templates
@pytest.mark.parametrize("name", ["gptoss", "phi3"])
def test_real_templates_that_end_a_last_message_otherwise_are_refused(tmp_path: Path, name: str) -> None:
    source = template(name)
    assert source is not None
    special = (
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "<|user|>",
        "<|assistant|>",
    )
    with pytest.raises(StartupError, match="ends a message otherwise once another follows"):
        load(tmp_path, source, special)
