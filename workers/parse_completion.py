"""Validates a 200 of `/v1/completions`.

SGLang (0.5.23) and vLLM (0.33) agree on most places: with `return_token_ids` the prompt's and the output's ids are on
the choice; with a number for `logprobs`, `logprobs.token_logprobs` has one item per output token. Payloads and weight
versions differ: vLLM's are on the choice, SGLang's in `sglext` and `metadata`.
"""

from __future__ import annotations

import msgspec

from workers.parse_json import Fields, Rejected, count_is, is_null, no_duplicates, object_at, typed, unambiguous
from workers.parse_parts import (
    DialectChoice,
    Logprob,
    Parsed,
    Top,
    cached_tokens,
    extension,
    finish_reason,
    float64,
    metadata,
    miscounted,
    only_choice,
    payloads_in,
    same_output,
    usage_of,
    weight_versions,
)
from workers.parse_prompt import IDS, CutPrompt, KnownTokens, Prompt, int32


class _Root(Top, kw_only=True):
    """A completion's top level, split in one pass down to the fields of its choices."""

    choices: list[Fields]


_ROOT = msgspec.json.Decoder(_Root)
_LOGPROBS = msgspec.json.Decoder(list[Logprob])
_TEXT = msgspec.json.Decoder(str)


def completion(
    body: bytes, dialect: DialectChoice, known: KnownTokens | None, sent: bytes | None, cut: CutPrompt | None
) -> tuple[Parsed, list[bytes]]:
    """A valid completion, and its long flat lists. Raises Rejected."""
    root: _Root = typed(_ROOT, body, "the body")
    choice = only_choice(root.choices)
    text_raw = choice.get("text")
    typed(_TEXT, text_raw, "choices[0].text", "a string")
    output_ids = typed(IDS, choice.get("token_ids"), "choices[0].token_ids")
    logprobs_raw = choice.get("logprobs")
    logprobs = object_at(logprobs_raw, "choices[0].logprobs")
    no_duplicates(bytes(logprobs_raw or b""), logprobs, "choices[0].logprobs")
    values = typed(_LOGPROBS, logprobs.get("token_logprobs"), "choices[0].logprobs.token_logprobs")
    if len(values) != len(output_ids):
        raise Rejected(f"choices[0].logprobs.token_logprobs has {len(values)} entries for {len(output_ids)} token ids")
    usage = usage_of(root)
    count_is(usage.get("completion_tokens"), len(output_ids), "usage.completion_tokens", "token_ids")
    count = usage.get("prompt_tokens")
    prompt = Prompt(choice.get("prompt_token_ids"), "choices[0].prompt_token_ids", known, sent, count, cut)
    copies = [
        *prompt.repeated(root.prompt_token_ids, "prompt_token_ids"),
        *same_output(choice, output_ids, "response_token_ids"),
    ]
    versions = metadata(root)
    if dialect == "auto":
        is_sglangs = "matched_stop" in choice or versions or not is_null(root.sglext)
        dialect = "sglang" if is_sglangs else "vllm"
    here = not is_null(choice.get("weight_versions"))
    parsed = Parsed(
        dialect=dialect,
        message=bytes(text_raw or b""),
        prompt_text=prompt.text,
        base=prompt.base,
        suffix_ids=prompt.suffix_ids,
        output_ids=int32(output_ids),
        logprobs=float64(values),
        sequence=prompt.followed_by(output_ids),
        finish_reason=finish_reason(choice, {}),
        weight_versions=weight_versions(
            choice["weight_versions"] if here else versions.get("weight_versions"),
            f"{'choices[0]' if here else 'metadata'}.weight_versions",
            versions.get("weight_version"),
            len(output_ids),
        ),
        payloads=payloads_in(choice, extension(root)),
        cached_tokens=cached_tokens(None, root.usage),
        miscounted=miscounted(prompt.tokens, ("usage.prompt_tokens", count)),
    )
    bulk = [prompt.text, *copies, bytes(choice["token_ids"]), bytes(logprobs["token_logprobs"])]
    unambiguous(body, choice, bulk)
    return parsed, bulk
