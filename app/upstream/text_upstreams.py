"""TURNLOG_TEXT_UPSTREAMS: where sessions that capture text alone are generated, by name."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from app.domain import patterns

WANTED = 'JSON such as {"judge": {"url": "https://api.example.com/v1", "key_env": "JUDGE_KEY", "model": "large"}}'

SHORT_KEY = 16
"""Characters. A shorter key is probably a word that stands for none, and is not hidden in replies."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class TextUpstream(NamedTuple):
    """`url` is the base URL as OpenAI's clients take it, with its path and without a slash at the end. `model` is that
    of sessions that name none."""

    name: str
    url: str
    key: str | None
    model: str | None

    def __repr__(self) -> str:
        return f"TextUpstream({self.name!r})"


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    key_env: str | None = None
    key: str | None = None
    model: str | None = None


def read_upstreams(text: str) -> tuple[TextUpstream, ...]:
    """Raises ValueError, whose message says what is accepted and has no value: any may be a key in the wrong place."""
    try:
        given = msgspec.json.decode(text, type=dict[str, _Given | str])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{WANTED}; {error}") from None
    return tuple(_upstream(name, _Given(one) if isinstance(one, str) else one) for name, one in given.items())


def _upstream(name: str, given: _Given) -> TextUpstream:
    """Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{WANTED}; a name has 1 to 64 letters, digits, dots, hyphens or underscores")
    url = given.url.strip().rstrip("/")
    fault = patterns.base_url_fault(url)
    if fault is not None:
        raise ValueError(f"{WANTED}; {name}.url is not a base URL, or has credentials, a query or a fragment")
    if given.key is not None and given.key_env is not None:
        raise ValueError(f"{WANTED}; {name} has key and key_env: it takes one of them")
    key = given.key if given.key_env is None else os.environ.get(given.key_env, "")
    if key is not None:
        key = key.strip()
        if not key:
            raise ValueError(f"{WANTED}; {name} has an empty key, or its key_env names a variable that is not set")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"{WANTED}; the key of {name} has characters that no header may have")
    if given.model is not None and not (0 < len(given.model) <= 512 and "\0" not in given.model):
        raise ValueError(f"{WANTED}; {name}.model must have 1 to 512 characters, and no NUL")
    return TextUpstream(name, url if urlsplit(url).path else f"{url}/v1", key, given.model)
