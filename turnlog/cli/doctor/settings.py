"""Checks the `TURNLOG_` variables: known, valid, and sensible together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from turnlog.cli.doctor.findings import Finding, ok, problem, warning
from turnlog.cli.doctor.host import memory
from turnlog.cli.output import size

if TYPE_CHECKING:
    from app.settings import Settings

DISTINCT = 8
"""The fewest different characters of a token that is not a repeated key."""

GOOD = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes a good one"


def examine() -> tuple[list[Finding], Settings | None]:
    """Every mistake; no settings if there is one."""
    from app import crash_points
    from app.settings import read_settings, unknown_names

    found = [
        warning(
            "settings",
            f"{name} is not a setting and is ignored" + (f"; the nearest is {nearest}" if nearest else ""),
            "unset it, or see docs/settings.md",
        )
        for name, nearest in unknown_names().items()
    ]
    if os.environ.get(crash_points.VARIABLE, "").strip():
        found.append(problem("settings", f"{crash_points.VARIABLE} is set, which is only for tests", "unset it"))
    settings, mistakes = read_settings()
    found += [problem("settings", line, "correct or unset the variable (docs/settings.md)") for line in mistakes]
    if settings is not None:
        found.append(ok("settings", f"{_told(settings)}; the others have defaults"))
    return found, settings


def _told(settings: Settings) -> str:
    """The names of those that are set; of numbers and switches also the values, which are no secrets."""
    told = []
    for name in sorted(settings.model_fields_set):
        value = getattr(settings, name)
        told.append(f"TURNLOG_{name.upper()}" + (f"={json.dumps(value)}" if isinstance(value, int | float) else ""))
    return ", ".join(told) or "none is set"


def advice(settings: Settings) -> Iterator[Finding]:
    """Valid settings that are probably a mistake."""
    from app.upstream.text_upstreams import SHORT_KEY

    yield from _tokens(settings)
    for upstream in settings.text_upstreams:
        if upstream.key is not None and len(upstream.key) < SHORT_KEY:
            yield warning(
                "settings",
                f"TURNLOG_TEXT_UPSTREAMS: the key of {upstream.name} has fewer than {SHORT_KEY} characters: it "
                "is hidden in errors, but not in replies that repeat it",
                "use a longer key, or leave it out if the upstream needs none",
            )
    for told in settings.warnings:
        yield warning("settings", told, "set TURNLOG_MOE_LAYERS and TURNLOG_MOE_TOPK")
    wanted, there = settings.inflight_bytes + settings.cache_bytes, memory()
    if wanted > there:
        yield warning(
            "memory",
            f"TURNLOG_INFLIGHT_BYTES and TURNLOG_CACHE_BYTES allow {size(wanted)} per process, but it has "
            f"{size(there)}",
            "lower TURNLOG_INFLIGHT_BYTES, or give the process more memory",
        )
    else:
        yield ok("memory", f"{size(there)}; bodies and cache may take {size(wanted)} per process")


def _tokens(settings: Settings) -> Iterator[Finding]:
    """The tokens' strength, never their text."""
    from app.settings import SHORT_TOKEN

    for name, secrets in (("ADMIN_TOKEN", settings.admin_token), ("SESSION_SECRET", settings.session_secret)):
        weak = [str(n) for n, text in enumerate(secrets, 1) if len(text) < SHORT_TOKEN or len(set(text)) < DISTINCT]
        if weak:
            yield warning("tokens", f"TURNLOG_{name}: number {', '.join(weak)} is short or uniform: guessable", GOOD)
    if settings.admin_token:
        older = len(settings.admin_token) - 1
        yield ok("tokens", "an admin token is set" + (f", and {older} older ones that still count" if older else ""))
        return
    yield warning("tokens", "no TURNLOG_ADMIN_TOKEN: every program on this machine is an admin", GOOD)
    for network in settings.trusted_networks:
        if network.prefixlen == 0:
            yield problem(
                "tokens",
                f"TURNLOG_TRUSTED_NETWORKS={network} without a token: whoever reaches the port is an admin",
                "name the networks of your own machines, or set TURNLOG_ADMIN_TOKEN",
            )
