"""Reads the settings, environment variables named `TURNLOG_*` or a file, once into one frozen object."""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app import crash_points
from app.domain import patterns
from app.domain.events import History, OnAbort, OnDivergence, ReplayKind
from app.domain.patterns import AddressPattern, address_pattern
from app.domain.request import SETTABLE
from app.domain.selection import selection_of
from app.errors import StartupError
from app.logs import Format as LogFormat
from app.logs import Level as LogLevel
from app.store.database_url import driver_arguments
from app.upstream.text_upstreams import TextUpstream, read_upstreams

log = logging.getLogger("turnlog.settings")

PREFIX = "TURNLOG_"
CONFIG = PREFIX + "CONFIG"
MIB = 1 << 20
DRIVERS = ("sqlite+aiosqlite", "postgresql+asyncpg")

SHORT_TOKEN = 16
"""Characters. A shorter token can be guessed."""

FLAT_ROWS_WARNING = (
    "TURNLOG_REPLAY asks for routed_experts without TURNLOG_MOE_LAYERS and TURNLOG_MOE_TOPK: unless the engine "
    "reports the shape of a row (vLLM does), rows are flat in samples and exports, and their size is unchecked"
)

Network = IPv4Network | IPv6Network


CLIENT_VARIABLES = frozenset({"TURNLOG_URL", "TURNLOG_TOKEN", "TURNLOG_RUN", "TURNLOG_AGENT"})
"""Variables of the command line and the client, which may be set in the server's environment too."""


def _workers() -> int:
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def none_if_off(value: object) -> object:
    """None for `off`, which turns a limit off."""
    return None if isinstance(value, str) and value.strip().lower() == "off" else value


def _in_bytes(value: object) -> object:
    """Bytes of a number with or without a unit: KiB to TiB are powers of 1024, kB to TB of 1000.

    Raises ValueError.
    """
    if not isinstance(value, str):
        return value
    if _WITH_UNIT.fullmatch(value):
        return int(_BYTES.validate_python(value))
    try:
        return int(value)
    except ValueError:
        raise ValueError("a number of bytes, or a size such as 512KiB, 64MiB or 2GiB") from None


_WITH_UNIT = re.compile(r"\s*\d+(\.\d+)?\s*([kmgt]i?)?b\s*", re.IGNORECASE)
"""`ByteSize` would also accept bits, text after the unit, and `64M`, which means 64 MiB to some and 64 MB to others."""

_BYTES = TypeAdapter(ByteSize)

SEVERAL = "together"
"""Type of an error that concerns several settings; its message names them."""

BUCKETS = ("s3", "gs", "az", "file")

ALL = ("all",)
"""Value of TURNLOG_ENGINE_SESSIONS for all engines."""


# What a variable's text becomes, and what is accepted of it. Each raises ValueError, which says what is accepted.


def _of_text(read: Callable[[str], object]) -> BeforeValidator:
    """A value that is no text is taken as it is."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def _parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^,\s]+", text))


def _secrets(text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) != len(parts) or not all(map(str.isprintable, parts)):
        raise ValueError("one or several, separated by commas, none of them empty or repeated")
    return tuple(parts)


def _networks(text: str) -> tuple[Network, ...]:
    try:
        return tuple(ip_network(part.strip()) for part in _parts(text))
    except ValueError as error:
        raise ValueError("networks such as 10.0.0.0/8 or fd00::/8, separated by commas") from error


def _address_patterns(text: str) -> tuple[AddressPattern, ...]:
    try:
        return tuple(map(address_pattern, _parts(text)))
    except ValueError as error:
        raise ValueError(
            "addresses such as 10.0.0.0/8, [fd00::]/8:30000 or http://*.workers.example.org:30000, separated by "
            "commas; * stands for any characters but dots, and not in the last label"
        ) from error


def _limits(text: str) -> LimitsGiven:
    try:
        return LimitsGiven.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise ValueError(f'a JSON object such as {{"turns": 50, "tokens": 100000}} ({message})') from None


def _settable(names: tuple[str, ...]) -> tuple[str, ...]:
    if not SETTABLE.issuperset(names):
        raise ValueError(f"some of {', '.join(sorted(SETTABLE))}, separated by commas")
    return names


def _whole_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Of webhooks; behind a `#` stands which sessions one is told about."""
    faults = (patterns.base_url_fault(url.partition("#")[0], may_have_query=True) for url in urls)
    if len(set(urls)) != len(urls) or any(fault is not None for fault in faults):
        raise ValueError(
            "URLs such as https://hooks.example.org/turnlog, separated by commas, each once, without credentials"
        )
    for url in urls:
        _, sign, told = url.partition("#")
        try:
            if sign:
                selection_of(told)
        except ValueError:
            raise ValueError("filters such as #run=a&group_prefix=maze&metadata.level=3 behind a URL") from None
    return urls


def _base_urls(urls: tuple[str, ...], wanted: str = "base URLs") -> tuple[str, ...]:
    for url in urls:
        fault = patterns.base_url_fault(url)
        if fault is not None:
            raise ValueError(f"{wanted} {fault}, separated by commas")
    if len(set(urls)) != len(urls):
        raise ValueError(f"{wanted}, each once")
    return urls


def _base_urls_or_all(urls: tuple[str, ...]) -> tuple[str, ...]:
    return urls if urls == ALL else _base_urls(urls, "all, or base URLs")


def _address(url: str | None) -> str | None:
    if url is not None and patterns.base_url_fault(url) is not None:
        raise ValueError("a URL such as https://turnlog.example.org, without credentials, query and fragment")
    return None if url is None else url.rstrip("/")


def _driver(value: str) -> str:
    try:
        url = make_url(value)
    except ArgumentError as error:
        raise ValueError("a URL such as sqlite+aiosqlite:///./var/turnlog.db") from error
    if url.drivername not in DRIVERS:
        raise ValueError(f"a URL that begins with one of {', '.join(d + '://' for d in DRIVERS)}")
    if url.drivername.startswith("sqlite") and url.database in (None, "", ":memory:"):
        raise ValueError("a file: a store in memory would lose every session")
    if not url.drivername.startswith("sqlite"):
        driver_arguments(url, 1.0)
    return value


def _place(value: str) -> str:
    if value == "database":
        return value
    scheme, _, rest = value.partition("://")
    if scheme not in BUCKETS or not rest.strip("/") or rest.startswith("/") != (scheme == "file"):
        raise ValueError("database, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder")
    return value.rstrip("/")


def _folder(value: str | None) -> str | None:
    if value is not None and not value.startswith("/"):
        raise ValueError("the absolute path of a folder, such as /srv/archives")
    return value


def _finish_or_abort(value: str) -> str:
    if not re.fullmatch(r"finish|abort_after:\d+(\.\d+)?", value):
        raise ValueError("finish, or abort_after:<seconds>")
    return value


Limit = Annotated[float | None, BeforeValidator(none_if_off)]
Size = Annotated[int, BeforeValidator(_in_bytes)]
_EACH_ONCE = _of_text(lambda text: tuple(dict.fromkeys(_words(text))))
BaseUrls = Annotated[
    tuple[str, ...], NoDecode, _of_text(lambda text: tuple(map(patterns.plain_base_url, _parts(text))))
]
Secrets = Annotated[tuple[str, ...], NoDecode, _of_text(_secrets)]
Networks = Annotated[tuple[Network, ...], NoDecode, _of_text(_networks)]

Feature = Literal[
    "annotations",
    "archive",
    "budgets",
    "checkpoints",
    "forks",
    "gates",
    "groups",
    "live",
    "objects",
    "otel",
    "page",
    "public_url",
    "resume",
    "rllm",
    "run_tokens",
    "runs",
    "search",
    "session_control",
    "text",
    "webhooks",
]
"""The folders of `app.features`."""

FEATURES: tuple[Feature, ...] = get_args(Feature)
SETTINGS_OF: Mapping[Feature, tuple[str, ...]] = {
    "budgets": ("limits",),
    "groups": ("retain_until_ack",),
    "objects": ("payloads", "payloads_keep_s"),
    "page": ("page_tokenizer",),
    "resume": ("stage_tokens_s",),
    "session_control": ("engine_sessions",),
    "text": ("text_upstreams",),
    "webhooks": ("webhooks", "webhook_secret", "webhook_stuck_s", "webhook_networks"),
}
"""Settings of features. Where the feature is off they have their defaults, whatever is set."""

DEFAULT_FEATURES = tuple(name for name in FEATURES if name not in ("rllm", "search"))
ALL_FEATURES = tuple(name for name in FEATURES if name != "rllm")
"""What `all` stands for: `rllm` changes what other routes answer, so it is on only where it is named."""


def _feature_names(value: Any) -> Collection[str]:
    if not isinstance(value, str):
        return tuple(value)
    if (names := _words(value)) == ("none",):
        return ()
    return tuple(dict.fromkeys(one for name in names for one in (ALL_FEATURES if name == "all" else (name,))))


class LimitsGiven(BaseModel):
    """The field `limits` of a new session, and the setting."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    turns: int | None = Field(default=None, ge=1, le=patterns.MAX_INTEGER)
    tokens: int | None = Field(default=None, ge=1, le=patterns.MAX_INTEGER)
    context: int | None = Field(default=None, ge=1, le=patterns.MAX_INTEGER)
    seconds: FiniteFloat | None = Field(default=None, gt=0)
    per: Literal["rollout", "session"] | None = None


class Settings(BaseSettings):
    """An operator's choices. The defaults work on one machine. An empty value counts as not set."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    database_url: Annotated[str, AfterValidator(_driver)] = Field(
        default="sqlite+aiosqlite:///./var/turnlog.db", repr=False
    )
    upstreams: Annotated[BaseUrls, AfterValidator(_base_urls)] = Field(default=(), repr=False)
    upstream_dialect: Literal["auto", "sglang", "vllm"] = "auto"
    logprobs_mode: Literal["auto", "raw", "scaled", "processed"] = "auto"
    upstream_api_key: str | None = Field(default=None, repr=False)
    upstream_connect_timeout_s: float = Field(default=5, gt=0, le=3600)
    upstream_timeout_s: float = Field(default=3600, gt=0, le=7 * 86400)
    router_workers: Annotated[tuple[AddressPattern, ...], NoDecode, _of_text(_address_patterns)] = ()
    text_upstreams: Annotated[tuple[TextUpstream, ...], NoDecode, _of_text(read_upstreams)] = Field(
        default=(), repr=False
    )
    placement: Literal["least_loaded", "hash"] = "least_loaded"
    affinity_ttl_s: Limit = Field(default=3600, gt=0)
    engine_sessions: Annotated[BaseUrls, AfterValidator(_base_urls_or_all)] = Field(default=(), repr=False)
    engine_session_ids: bool = False
    on_abort: OnAbort | None = None
    stage_tokens_s: float = Field(default=0, ge=0, le=3600)
    tokenizer: str | None = None
    tito_family: str = "auto"
    page_tokenizer: str | None = None
    rollback_window: int = Field(default=1, ge=0, le=1000)
    history: History | None = None
    on_divergence: OnDivergence = "reject"
    agents: Literal["branches", "sessions"] = "branches"
    without_session: Literal["refuse", "record"] = "refuse"
    session_from_body: Annotated[tuple[Literal["prompt_cache_key", "metadata.user_id"], ...], NoDecode, _EACH_ONCE] = ()
    samples_versions: Literal["names", "spans"] = "names"
    max_open_turns: int = Field(default=64, ge=1, le=100_000)
    max_turns: int = Field(default=10_000, ge=1, le=10_000_000)
    limits: Annotated[LimitsGiven | None, NoDecode, _of_text(_limits)] = None
    max_replay_bytes: Annotated[Size | None, BeforeValidator(none_if_off)] = Field(default=1024 * MIB, ge=MIB)
    picker: str | None = None
    features: Annotated[tuple[Feature, ...], NoDecode, BeforeValidator(_feature_names)] = DEFAULT_FEATURES
    replay: Annotated[tuple[ReplayKind, ...], NoDecode, _EACH_ONCE] = ()
    replay_incremental: bool = False
    moe_layers: Annotated[int | None, BeforeValidator(none_if_off)] = Field(default=None, ge=1, le=10_000)
    moe_topk: Annotated[int | None, BeforeValidator(none_if_off)] = Field(default=None, ge=1, le=10_000)
    payloads: Annotated[str, AfterValidator(_place)] = "database"
    payloads_timeout_s: float = Field(default=120, gt=0, le=3600)
    payloads_keep_s: float = Field(default=600, ge=0, le=30 * 86400)
    client_reply: Literal["asked", "verbatim"] = "asked"
    stream_keepalive_s: float = Field(default=15, ge=0, le=3600)
    on_disconnect: Annotated[str, AfterValidator(_finish_or_abort)] = "finish"
    max_request_bytes: Size = Field(default=64 * MIB, ge=1024)
    max_upstream_bytes: Size = Field(default=256 * MIB, ge=1024)
    inflight_bytes: Size = Field(default=2048 * MIB, ge=1024)
    inline_max_bytes: Size = Field(default=64 * 1024, ge=0)
    workers: int = Field(default_factory=_workers, ge=1, le=256)
    worker_deadline_s: float = Field(default=30, gt=0, le=3600)
    worker_memory_bytes: Size = Field(default=4096 * MIB, ge=256 * MIB)
    cache_bytes: Size = Field(default=256 * MIB, ge=0)
    lease_s: float = Field(default=8, ge=1, le=3600)
    idle_close_s: Limit = Field(default=None, gt=0)
    closed_replay_ttl_s: Limit = Field(default=86400, ge=0)
    closed_ttl_s: Limit = Field(default=None, gt=0)
    retain_until_ack: bool = False
    max_db_bytes: Annotated[Size | None, BeforeValidator(none_if_off)] = Field(default=None, ge=MIB)
    log_format: LogFormat = "auto"
    log_level: LogLevel = "info"
    public_url: Annotated[str | None, AfterValidator(_address)] = None
    admin_token: Secrets = Field(default=(), repr=False)
    session_secret: Secrets = Field(default=(), repr=False)
    session_rewards: Literal["refuse", "allow"] = "refuse"
    session_params: Annotated[tuple[str, ...], NoDecode, _EACH_ONCE, AfterValidator(_settable)] = ()
    max_agent_sessions: int = Field(default=1000, ge=0)
    file_root: Annotated[str | None, AfterValidator(_folder)] = None
    trusted_networks: Networks = ()
    webhooks: Annotated[tuple[str, ...], NoDecode, _of_text(_words), AfterValidator(_whole_urls)] = Field(
        default=(), repr=False
    )
    webhook_secret: Secrets = Field(default=(), repr=False, validate_default=True)
    webhook_stuck_s: Limit = Field(default=1800, gt=0)
    webhook_networks: Networks = ()

    @model_validator(mode="before")
    @classmethod
    def _set(cls, given: dict[str, object]) -> dict[str, object]:
        chosen = {name: value for name, value in given.items() if not (isinstance(value, str) and not value.strip())}
        on = _feature_names(chosen.get("features", DEFAULT_FEATURES))
        without = {name for feature, names in SETTINGS_OF.items() if feature not in on for name in names}
        return {name: value for name, value in chosen.items() if name not in without}

    @field_validator("webhook_secret")
    @classmethod
    def _keys(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if info.data.get("webhooks") and not value:
            raise PydanticCustomError(SEVERAL, "TURNLOG_WEBHOOKS requires TURNLOG_WEBHOOK_SECRET")
        try:
            for secret in value:
                patterns.webhook_key(secret)
        except ValueError:
            raise ValueError(
                "whsec_ and 24 to 64 random bytes in base64, or several such secrets, separated by commas"
            ) from None
        return value

    @field_validator("moe_topk")
    @classmethod
    def _both_or_none(cls, value: int | None, info: ValidationInfo) -> int | None:
        if "moe_layers" in info.data and (info.data["moe_layers"] is None) != (value is None):
            raise PydanticCustomError(SEVERAL, "set both TURNLOG_MOE_LAYERS and TURNLOG_MOE_TOPK, or neither")
        return value

    @property
    def abort_policy(self) -> OnAbort:
        """The policy for aborted generations of sessions that do not set one."""
        return self.on_abort or ("return" if self.tokenizer is None else "continue")

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """Shape of a row of `routed_experts`: layers, experts per token; None if not set."""
        return None if self.moe_layers is None or self.moe_topk is None else (self.moe_layers, self.moe_topk)

    @property
    def warnings(self) -> list[str]:
        """Valid settings that may not do what the operator wants, for the log and `/ready`."""
        learned = self.upstream_dialect == "vllm" or self.expert_shape is not None
        return [] if learned or "routed_experts" not in self.replay else [FLAT_ROWS_WARNING]

    @cached_property
    def abort_after_s(self) -> float | None:
        """Seconds after its client's disconnect at which a turn is aborted; None: it is finished (`finish`)."""
        mode, _, seconds = self.on_disconnect.partition(":")
        return float(seconds) if mode == "abort_after" else None


def can_be_off(field: FieldInfo) -> bool:
    """Whether a setting accepts `off`."""
    return any(isinstance(one, BeforeValidator) and one.func is none_if_off for one in field.metadata)


def load_settings(*names: str) -> Settings:
    """Read all settings, or only those named, such as `lease_s`; the others have defaults.

    Raises StartupError with a line for each mistake: the variable, its value and what is accepted.
    """
    if not names:
        for name, nearest in unknown_names().items():
            hint = "" if nearest is None else f"; the nearest is {nearest}"
            log.warning("%s is not a setting of this version and is ignored%s", name, hint)
    settings, mistakes = read_settings(*names)
    if settings is None:
        raise StartupError(*mistakes)
    if not names:
        _warn_of_weak(settings)
    return settings


def known_names() -> frozenset[str]:
    """All supported variables, without the one for tests (`crash_points.VARIABLE`)."""
    return CLIENT_VARIABLES | {CONFIG} | {PREFIX + name.upper() for name in Settings.model_fields}


def unknown_names() -> dict[str, str | None]:
    """Variables that are ignored with a warning, each with the nearest setting or None. Misspelt ones are errors."""
    unknown = unknown_variables(os.environ, known_names())
    return {one.name: one.nearest for one in unknown if not one.is_misspelt and one.name != crash_points.VARIABLE}


def read_settings(*names: str) -> tuple[Settings | None, list[str]]:
    """Like `load_settings`, but returns the mistakes; the settings are None if there are any."""
    others = {
        name: field.get_default(call_default_factory=True)
        for name, field in Settings.model_fields.items()
        if names and name not in names
    }
    mistakes = _misspelt(names)
    if not names:
        mistakes += crash_points.mistakes()
    try:
        config = read_config(Settings.model_fields)
    except StartupError as error:
        return None, [*mistakes, *error.lines]
    try:
        settings = Settings(**{**config.values, **others})
    except ValidationError as error:
        problems = {str(problem["loc"][0]): problem for problem in reversed(error.errors())}
        return None, mistakes + [
            _one_line(problems[name], config) for name in Settings.model_fields if name in problems
        ]
    return (None if mistakes else settings), mistakes


def _misspelt(names: Collection[str]) -> list[str]:
    wanted = {PREFIX + name.upper() for name in names} or known_names()
    unknown = unknown_variables(os.environ, known_names())
    misspelt = [one for one in unknown if one.is_misspelt and one.nearest in wanted]
    return [f"{one.name} is not a setting: did you mean {one.nearest}?" for one in misspelt]


def _warn_of_weak(settings: Settings) -> None:
    """Log warnings about weak secrets, and about settings without effect."""
    for name in ("admin_token", "session_secret"):
        if any(len(secret) < SHORT_TOKEN for secret in getattr(settings, name)):
            log.warning("%s%s has fewer than %d characters: it can be guessed", PREFIX, name.upper(), SHORT_TOKEN)
    for feature, names in SETTINGS_OF.items():
        for name in names:
            if feature not in settings.features and os.environ.get(PREFIX + name.upper(), "").strip():
                log.warning("%s%s has no effect without %s in TURNLOG_FEATURES", PREFIX, name.upper(), feature)
    for name in ("session_secret", "session_rewards"):
        if name in settings.model_fields_set and not settings.admin_token:
            log.warning("%s%s has no effect without TURNLOG_ADMIN_TOKEN", PREFIX, name.upper())


def _one_line(problem: Mapping[str, Any], config: ConfigFile) -> str:
    wanted = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input should be ").split(", unable")[0]
    if problem["type"] == SEVERAL:
        return wanted
    setting = str(problem["loc"][0])
    name = PREFIX + setting.upper()
    value = config.values.get(setting, os.environ.get(name, problem["input"]))
    if name.endswith(("API_KEY", "ADMIN_TOKEN", "SESSION_SECRET", "TEXT_UPSTREAMS", "WEBHOOKS", "WEBHOOK_SECRET")):
        value = "(not shown)"
    if name.endswith(("DATABASE_URL", "UPSTREAMS", "ENGINE_SESSIONS")):
        value = _without_password(str(value))
    if wanted.startswith(("greater", "less")):
        wanted = f"a number {wanted}"
    if can_be_off(Settings.model_fields[setting]):
        wanted += ", or off"
    place = config.place(setting) if setting in config.values else name
    return f"{place}={value!r}: expected {wanted}"


def _without_password(url: str) -> str:
    """Hide the password, also in a URL that cannot be parsed, and in a query parameter."""
    return re.sub(r"([?&](?:ssl)?password=)[^&,]*", r"\1***", re.sub(r"(://[^:/@,]*):[^,]*@", r"\1:***@", url))


# The file that TURNLOG_CONFIG names; a variable takes precedence over it.


class ConfigFile(NamedTuple):
    """`values` are texts as a variable would have, by the settings' names; `lines` where they stand."""

    path: str
    values: Mapping[str, str]
    lines: Mapping[str, int]

    def place(self, name: str) -> str:
        return f"{self.path}:{self.lines[name]}: {name}"


def read_config(known: Collection[str]) -> ConfigFile:
    """The values that no variable sets; none without a file.

    Raises StartupError for a file that cannot be read, an unknown key and a date. No value is in its lines.
    """
    path = os.environ.get(CONFIG, "").strip()
    if not path:
        return ConfigFile("", {}, {})
    try:
        text = Path(path).read_text(encoding="utf-8")
        given = tomllib.loads(text)
    except OSError as error:
        raise StartupError(f"{CONFIG}={path!r}: {error.strerror}") from None
    except ValueError as error:  # of TOML, with its line, or of UTF-8
        raise StartupError(f"{path}: {'not UTF-8' if isinstance(error, UnicodeError) else error}") from None
    lines = {name: _line_of(name, text) for name in given}
    mistakes = [_unknown(path, lines[name], name, known) for name in given if name not in known]
    if mistakes:
        raise StartupError(*mistakes)
    variables = {name.upper() for name, value in os.environ.items() if value.strip()}
    chosen = {name: value for name, value in given.items() if PREFIX + name.upper() not in variables}
    try:
        values = {name: _as_text(value) for name, value in chosen.items()}
    except TypeError:  # a date, which JSON does not have either
        raise StartupError(f"{path}: expected text, a number, true or false, a list or a table") from None
    return ConfigFile(path, values, lines)


def _as_text(value: object) -> str:
    """Raises TypeError."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return json.dumps(value)


def _line_of(name: str, text: str) -> int:
    """Where a key stands at the top level: `name = …`, `name.field = …` or `[name]`."""
    key = rf"[\"']?{re.escape(name)}[\"']?"
    match = re.search(rf"^[ \t]*(?:{key}[ \t]*[.=]|\[+[ \t]*{key}[ \t]*[.\]])", text, re.MULTILINE)
    return 1 if match is None else text.count("\n", 0, match.start()) + 1


def _unknown(path: str, line: int, name: str, known: Collection[str]) -> str:
    near = get_close_matches(name.lower().removeprefix(PREFIX.lower()), known, n=1)
    return f"{path}:{line}: {name} is not a setting" + (f": did you mean {near[0]}?" if near else "")


# Variables that are no settings: misspelt, unrelated, or set by a Kubernetes cluster.

MIN_RATIO = 0.75
"""Similarity (`difflib`'s ratio) from which a word counts as a misspelling of another: `DATABSE` has 0.93 of
`DATABASE`, `BASE` 0.67. The same ratio of the whole names, without the prefix, makes a setting the nearest one."""


class UnknownName(NamedTuple):
    """A variable that is not a setting. `nearest` is the most similar setting, or None."""

    name: str
    nearest: str | None
    is_misspelt: bool


_INJECTED = re.compile(
    r"""TURNLOG_(?:
      SERVICE_\w+ | PORT(?:_\w+)?
      | \w+_SERVICE_(?: HOST | PORT(?:_\w+)? )
      | \w+_PORT(?: _\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))? )?
    )""",
    re.VERBOSE,
)
"""Kubernetes sets these in each pod for a service `turnlog`, and for any `turnlog-…`."""


def unknown_variables(environment: Mapping[str, str], known: Collection[str]) -> list[UnknownName]:
    """Variables that are not settings, ordered by name, without empty ones and those that a cluster injects."""
    names = (name for name, value in environment.items() if name.startswith(PREFIX) and value.strip())
    unknown = [name for name in names if name not in known and not _INJECTED.fullmatch(name)]
    return [_unknown_name(name, known) for name in sorted(unknown)]


def _unknown_name(name: str, known: Collection[str]) -> UnknownName:
    def closest(given: str, others: Collection[str]) -> list[str]:
        return get_close_matches(given, others, n=1, cutoff=MIN_RATIO)

    def is_misspelling(given: str, meant: str) -> bool:
        """Is `given` a misspelling of `meant`: only other separators, or as many words, each of them similar?"""
        words, others = given.split("_"), meant.split("_")
        if "".join(words) == "".join(others):
            return True
        pairs = zip(words, others, strict=False)
        return len(words) == len(others) and all(closest(word, [other]) for word, other in pairs)

    given = name.removeprefix(PREFIX)
    settings = [setting.removeprefix(PREFIX) for setting in known]
    misspelt = [setting for setting in settings if is_misspelling(given, setting)]
    nearest = closest(given, misspelt) or closest(given, settings)
    return UnknownName(name, PREFIX + nearest[0] if nearest else None, bool(misspelt))
