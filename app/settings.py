"""The settings: environment variables named `TURNLOG_*`, read once into one frozen object."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app import crash_points
from app.domain import base_url
from app.domain.events import OnAbort, OnDivergence
from app.domain.holding import SETTABLE
from app.errors import StartupError
from app.logs import Format as LogFormat
from app.logs import Level as LogLevel

log = logging.getLogger("turnlog.settings")

PREFIX = "TURNLOG_"
MIB = 1 << 20
DRIVERS = ("sqlite+aiosqlite", "postgresql+asyncpg")

SHORT_TOKEN = 16
"""Characters; one that has fewer can be guessed."""

FLAT_ROWS = (
    "TURNLOG_REPLAY asks for routed_experts, and TURNLOG_MOE_LAYERS and TURNLOG_MOE_TOPK are not set: where an engine "
    "does not tell the shape of a row (vLLM does), rows are flat in samples and exports, and their size is not checked"
)

Network = IPv4Network | IPv6Network


CLIENTS = frozenset({"TURNLOG_URL", "TURNLOG_TOKEN"})
"""Of the command line and the client, which may run in the server's environment."""


def _workers() -> int:
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _off(value: object) -> object:
    """`off`, or nothing, for a limit that is not in force."""
    return None if isinstance(value, str) and value.strip().lower() in ("", "off") else value


def _unset(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


Limit = Annotated[float | None, BeforeValidator(_off)]


ALL = ("all",)
"""Of TURNLOG_ENGINE_SESSIONS: every engine there is."""

OFF = frozenset(
    PREFIX + name for name in ("AFFINITY_TTL_S", "IDLE_CLOSE_S", "CLOSED_REPLAY_TTL_S", "CLOSED_TTL_S", "MAX_DB_BYTES")
)


class Settings(BaseSettings):
    """What an operator can choose. Every field has a default that works on one machine."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    database_url: str = Field(default="sqlite+aiosqlite:///./var/turnlog.db", repr=False)
    upstreams: Annotated[tuple[str, ...], NoDecode] = Field(default=(), repr=False)
    upstream_dialect: Literal["auto", "sglang", "vllm"] = "auto"
    upstream_api_key: str | None = Field(default=None, repr=False)
    upstream_connect_timeout_s: float = Field(default=5, gt=0, le=3600)
    upstream_timeout_s: float = Field(default=3600, gt=0, le=7 * 86400)
    placement: Literal["least_loaded", "hash"] = "least_loaded"
    affinity_ttl_s: Limit = Field(default=3600, gt=0)
    engine_sessions: Annotated[tuple[str, ...], NoDecode] = Field(default=(), repr=False)
    on_abort: Annotated[OnAbort | None, BeforeValidator(_unset)] = None
    tokenizer: Annotated[str | None, BeforeValidator(_unset)] = None
    tito_family: str = "auto"
    rollback_window: int = Field(default=1, ge=0, le=1000)
    on_divergence: OnDivergence = "reject"
    replay: Annotated[tuple[Literal["routed_experts", "indexer_topk"], ...], NoDecode] = ()
    replay_incremental: bool = False
    moe_layers: Annotated[int | None, BeforeValidator(_off)] = Field(default=None, ge=1, le=10_000)
    moe_topk: Annotated[int | None, BeforeValidator(_off)] = Field(default=None, ge=1, le=10_000)
    client_reply: Literal["auto", "verbatim", "lean"] = "auto"
    stream_keepalive_s: float = Field(default=15, ge=0, le=3600)
    on_disconnect: str = "finish"
    max_request_bytes: int = Field(default=64 * MIB, ge=1024)
    max_upstream_bytes: int = Field(default=256 * MIB, ge=1024)
    inflight_bytes: int = Field(default=2048 * MIB, ge=1024)
    inline_max_bytes: int = Field(default=64 * 1024, ge=0)
    workers: int = Field(default_factory=_workers, ge=1, le=256)
    worker_deadline_s: float = Field(default=30, gt=0, le=3600)
    worker_memory_bytes: int = Field(default=4096 * MIB, ge=256 * MIB)
    cache_bytes: int = Field(default=256 * MIB, ge=0)
    lease_s: float = Field(default=8, ge=1, le=3600)
    idle_close_s: Limit = Field(default=None, gt=0)
    closed_replay_ttl_s: Limit = Field(default=86400, ge=0)
    closed_ttl_s: Limit = Field(default=None, gt=0)
    retain_until_ack: bool = False
    max_db_bytes: Annotated[int | None, BeforeValidator(_off)] = Field(default=None, ge=MIB)
    log_format: LogFormat = "auto"
    log_level: LogLevel = "info"
    admin_token: Annotated[tuple[str, ...], NoDecode] = Field(default=(), repr=False)
    session_secret: Annotated[tuple[str, ...], NoDecode] = Field(default=(), repr=False)
    session_params: Annotated[tuple[str, ...], NoDecode] = ()
    max_agent_sessions: int = Field(default=1000, ge=0)
    trusted_networks: Annotated[tuple[Network, ...], NoDecode] = ()

    @field_validator("upstreams", "engine_sessions", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(base_url.plain(part) for part in value.split(",") if part.strip())
        return value

    @field_validator("admin_token", "session_secret", mode="before")
    @classmethod
    def _secrets(cls, value: object) -> object:
        if not isinstance(value, str) or not value.strip():
            return () if isinstance(value, str) else value
        parts = [part.strip() for part in value.split(",")]
        if not all(parts) or len(set(parts)) != len(parts) or not all(map(str.isprintable, parts)):
            raise ValueError("one, or several that are separated by commas, each once and none of them empty")
        return tuple(parts)

    @field_validator("trusted_networks", mode="before")
    @classmethod
    def _networks(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return tuple(ip_network(part.strip()) for part in value.split(",") if part.strip())
        except ValueError as error:
            raise ValueError("networks such as 10.0.0.0/8 or fd00::/8, separated by commas") from error

    @field_validator("session_params")
    @classmethod
    def _settable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not SETTABLE.issuperset(value):
            raise ValueError(f"some of {', '.join(sorted(SETTABLE))}, separated by commas")
        return value

    @field_validator("replay", "session_params", mode="before")
    @classmethod
    def _kinds(cls, value: object) -> object:
        return tuple(dict.fromkeys(re.findall(r"[^,\s]+", value))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _both_or_none(self) -> Settings:
        if (self.moe_layers is None) != (self.moe_topk is None):
            raise ValueError("TURNLOG_MOE_LAYERS and TURNLOG_MOE_TOPK: accepted is both, or none")
        return self

    @model_validator(mode="after")
    def _takes_ids(self) -> Settings:
        if self.tokenizer is not None and self.upstream_dialect == "vllm":
            raise ValueError(
                "TURNLOG_TOKENIZER: vLLM's chat route takes no token ids; accepted is TURNLOG_UPSTREAM_DIALECT "
                "auto or sglang, or no tokenizer"
            )
        return self

    @field_validator("upstreams")
    @classmethod
    def _base_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _require_base_urls(value, "base URLs")
        return value

    @field_validator("engine_sessions")
    @classmethod
    def _base_urls_or_all(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value != ALL:
            _require_base_urls(value, "all, or base URLs")
        return value

    @field_validator("database_url")
    @classmethod
    def _driver(cls, value: str) -> str:
        try:
            url = make_url(value)
        except ArgumentError as error:
            raise ValueError("a URL such as sqlite+aiosqlite:///./var/turnlog.db") from error
        if url.drivername not in DRIVERS:
            raise ValueError(f"a URL that begins with one of {', '.join(d + '://' for d in DRIVERS)}")
        if url.drivername.startswith("sqlite") and url.database in (None, "", ":memory:"):
            raise ValueError("a file: a store in memory would lose every session")
        return value

    @field_validator("on_disconnect")
    @classmethod
    def _finish_or_abort(cls, value: str) -> str:
        if not re.fullmatch(r"finish|abort_after:\d+(\.\d+)?", value):
            raise ValueError("finish, or abort_after:<seconds>")
        return value

    @property
    def abort_policy(self) -> OnAbort:
        """What becomes of an aborted generation where a session does not say."""
        return self.on_abort or ("return" if self.tokenizer is None else "continue")

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """A row of `routed_experts`: layers, experts a token."""
        return None if self.moe_layers is None or self.moe_topk is None else (self.moe_layers, self.moe_topk)

    @property
    def warnings(self) -> list[str]:
        """What is accepted and may be less than was meant, for the log and `/ready`."""
        learned = self.upstream_dialect == "vllm" or self.expert_shape is not None
        return [] if learned or "routed_experts" not in self.replay else [FLAT_ROWS]

    @property
    def abort_after_s(self) -> float | None:
        """Seconds a turn outlives its client; None: for as long as it takes (`finish`)."""
        mode, _, seconds = self.on_disconnect.partition(":")
        return float(seconds) if mode == "abort_after" else None


def _require_base_urls(urls: tuple[str, ...], wanted: str) -> None:
    """Raises ValueError that begins with what is `wanted`."""
    for url in urls:
        fault = base_url.fault(url)
        if fault is not None:
            raise ValueError(f"{wanted} {fault}, separated by commas")
    if len(set(urls)) != len(urls):
        raise ValueError(f"{wanted}, each once")


def load_settings() -> Settings:
    """Read the environment. Raises StartupError with one line that names variable, value and choices."""
    crash_points.check()
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {crash_points.VARIABLE} | CLIENTS
    for name in sorted(n for n in os.environ if n.startswith(PREFIX) and n not in known):
        log.warning("%s is not a setting of this version and is ignored", name)
    try:
        settings = Settings()
    except ValidationError as error:
        raise StartupError(_one_line(error.errors()[0])) from error
    _warn_of_weak(settings)
    return settings


def _warn_of_weak(settings: Settings) -> None:
    """What is accepted, and better otherwise."""
    for name in ("admin_token", "session_secret"):
        if any(len(secret) < SHORT_TOKEN for secret in getattr(settings, name)):
            log.warning("%s%s has fewer than %d characters: it can be guessed", PREFIX, name.upper(), SHORT_TOKEN)
    if settings.session_secret and not settings.admin_token:
        log.warning("TURNLOG_SESSION_SECRET does nothing without TURNLOG_ADMIN_TOKEN")


def _one_line(problem: Mapping[str, Any]) -> str:
    wanted = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input should be ").split(", unable")[0]
    if not problem["loc"]:
        return wanted
    name = PREFIX + str(problem["loc"][0]).upper()
    value = problem["input"]
    if name.endswith(("API_KEY", "ADMIN_TOKEN", "SESSION_SECRET")):
        value = "(not shown)"
    if name.endswith(("DATABASE_URL", "UPSTREAMS", "ENGINE_SESSIONS")):
        value = _without_password(str(value))
    if name in OFF:
        wanted += ", or off"
    return f"{name}={value!r}: accepted is {wanted}"


def _without_password(url: str) -> str:
    """Hide what stands between the user's name and the host, also in a URL too broken to parse."""
    return re.sub(r"(://[^:/@,]*):[^,]*@", r"\1:***@", url)
