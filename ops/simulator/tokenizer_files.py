"""Writes the simulator's tokenizer and chat template as a Hugging Face folder.

Run it with ``python -m ops.simulator.tokenizer_files DIR``. ``transformers.AutoTokenizer`` loads the folder.
``apply_chat_template`` with a generation prompt returns the ids of the simulator's own template, but for two things: an
image is one placeholder, which a processor expands, and an assistant text that begins with white space is encoded
together with the newline before it, while :mod:`ops.simulator.template` keeps the border at which sampling began.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ops.simulator.template import GENERATION_PROMPT, TOOLS_INTRO, TOOLS_OUTRO
from ops.simulator.tokenizer import IM_END, IM_START, IMAGE_PAD, VISION_END, VISION_START, Tokenizer

_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}
            {{- @image if part.type in ['image', 'image_url'] else part.get('text', '') -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro call(tool_call) -%}
    {%- set arguments = tool_call.function.arguments | default('{}') -%}
    {{- '<tool_call>\\n{"name": ' + (tool_call.function.name | default('') | tojson) + ', "arguments": ' -}}
    {{- arguments if arguments is string else arguments | tojson -}}
    {{- '}\\n</tool_call>' -}}
{%- endmacro -%}
{%- if not messages -%}{{- raise_exception('Messages cannot be empty.') -}}{%- endif -%}
{%- set systems = ['system', 'developer'] -%}
{%- set first_is_system = messages[0].role in systems -%}
{%- if tools -%}
    {{- @start + 'system\\n' -}}
    {%- if first_is_system -%}{{- text(messages[0].content) -}}{%- endif -%}
    {{- @intro -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- @outro + @end + '\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- @start + 'user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- @end + '\\n' -}}{%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- set content = text(message.content) -%}
        {{- @generation -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- content -}}
        {%- for tool_call in message.tool_calls or [] -%}
            {{- '\\n' if content or not loop.first -}}
            {{- call(tool_call) -}}
        {%- endfor -%}
        {{- @end + '\\n' -}}
    {%- elif message.role in systems or message.role == 'user' -%}
        {%- if not (loop.first and tools and first_is_system) -%}
            {{- @start + ('user' if message.role == 'user' else 'system') + '\\n' -}}
            {{- text(message.content) + @end + '\\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- raise_exception('unknown role') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- @generation -}}{%- endif -%}
"""


def chat_template() -> str:
    """The template of :mod:`ops.simulator.template` in Jinja; reasoning is always kept."""
    literals = {
        "@start": IM_START,
        "@end": IM_END,
        "@generation": GENERATION_PROMPT,
        "@intro": TOOLS_INTRO,
        "@outro": TOOLS_OUTRO,
        "@image": VISION_START + IMAGE_PAD + VISION_END,
    }
    template = _TEMPLATE
    for name, value in literals.items():
        template = template.replace(name, json.dumps(value))
    return template


def write(folder: Path, tokenizer: Tokenizer | None = None) -> None:
    """Create ``folder`` and write ``tokenizer.json`` and ``tokenizer_config.json`` into it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or Tokenizer()).bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": IM_END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_048_576,
        "chat_template": chat_template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(prog="python -m ops.simulator.tokenizer_files", description=write.__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
