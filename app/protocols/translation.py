"""Translates a body's messages into a chat's, from where an earlier body had come to (`app.domain.known_body`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import msgspec

from app.domain.known_body import STATES, BodyPrefix, State


class Translator(Protocol):
    """Reads messages one by one. What it makes of the first ones must not depend on those that follow."""

    def read(self, index: int, raw: msgspec.Raw) -> None:
        """Read the body's message `index`. Raises InvalidRequest, and Unsupported."""

    def copy(self) -> Self:
        """One that goes on from here by itself."""


T = TypeVar("T", bound=Translator)


def translated(
    translator: T, raws: Sequence[msgspec.Raw], prefix: BodyPrefix | None, *, keeps_states: bool
) -> tuple[T, Sequence[State]]:
    """The translator after all of these messages, and with `keeps_states` its states after the newest ones.

    It reads only what follows a state that is known of the messages' beginning. Raises as `Translator.read`.
    """
    known = () if prefix is None or prefix.known.translation is None else prefix.known.translation.states
    begun = None if prefix is None else prefix.state(known)
    read = 0
    if begun is not None:
        translator, read = begun.reader.copy(), begun.messages
    states = [state for state in known if state.messages <= read]
    for index in range(read, len(raws)):
        translator.read(index, raws[index])
        if keeps_states and index + STATES >= len(raws):
            states.append(State(index + 1, translator.copy()))
    return translator, states[-STATES:]
