"""Conditions on sessions that lists and searches share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.domain import patterns
from app.store.heads_view import HeadFilter, Status
from app.store.reads import Connection

Text = Annotated[str | None, Field(max_length=512, pattern=patterns.NO_NUL)]
Number = Annotated[float | None, Field(allow_inf_nan=False)]

NewestVersion = Callable[[Connection], int | None]
"""The newest weight version of any session or engine."""

NEVER = -1
"""Below every weight version."""


class SessionConditions(BaseModel):
    """Conditions on a session's row; None: any."""

    model_config = ConfigDict(frozen=True)

    status: Status | None = Field(default=None, description="Only sessions with this status.")
    group_id: Text = Field(default=None, description="Only sessions of this group.")
    attempt: int | None = Field(default=None, ge=0, le=2**31 - 1, description="Only sessions with this attempt number.")
    engine: Text = Field(default=None, description="Only sessions that are bound to this engine.")
    min_reward: Number = Field(default=None, description="Only sessions with at least this reward.")
    max_reward: Number = Field(default=None, description="Only sessions with at most this reward.")
    unrewarded: bool = Field(default=False, description="Only sessions without a reward.")
    min_staleness: int | None = Field(
        default=None,
        ge=0,
        le=2**62,
        description="Only sessions whose newest weight version is at least this many versions behind the newest one.",
    )
    tag: str | None = Field(default=None, pattern=patterns.TAG, description="Only sessions with this tag.")

    metadata: list[str] = Field(
        default=[],
        max_length=20,
        description="Only sessions whose metadata has this value, as `key=value`; repeated: all of them. A dot in the "
        "key leads into an object.",
    )

    @field_validator("metadata", mode="after")
    @classmethod
    def _pairs(cls, given: list[str]) -> list[str]:
        if any(not one.partition("=")[0] or "=" not in one for one in given):
            raise ValueError("metadata must be key=value")
        return given

    @property
    def wanted_metadata(self) -> list[tuple[str, str]]:
        return [(one.partition("=")[0], one.partition("=")[2]) for one in self.metadata]

    def of_heads(self, newest: int | None) -> HeadFilter:
        """`newest` is the newest weight version; not used without `min_staleness`."""
        most = None
        if self.min_staleness is not None:
            most = NEVER if newest is None else newest - self.min_staleness
        return HeadFilter(
            status=self.status,
            group_id=self.group_id,
            attempt=self.attempt,
            engine=self.engine,
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            unrewarded=self.unrewarded,
            most_version=most,
            tag=self.tag,
        )
