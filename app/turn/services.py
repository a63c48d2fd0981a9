"""The services that all turns of a process share."""

from __future__ import annotations

import msgspec

from app.domain.proofs import Proofs
from app.fleet.engines import Engines
from app.fleet.gates import Gates
from app.fleet.native import NativeRoutes
from app.fleet.state import FleetState
from app.sessions.cache import SessionCache
from app.sessions.lifecycle import Clock
from app.settings import Settings
from app.store.objects.objects import Objects
from app.store.ports import Writer
from app.turn.claims import Claims
from app.turn.large_bodies import LargeBodies
from app.turn.placement import Placement
from app.turn.retries import Retries
from app.turn.session_control import SessionControls
from app.turn.staging import Staging
from app.turn.token_in import TokenIn
from app.turn.validation import ReplyValidator


class TurnServices(msgspec.Struct, frozen=True):
    """`clock` gives seconds since the epoch. `objects`: large replay payloads go into object storage."""

    cache: SessionCache
    claims: Claims
    retries: Retries
    writer: Writer
    objects: Objects | None
    engines: Engines
    fleet: FleetState
    gates: Gates
    placement: Placement
    validator: ReplyValidator
    staging: Staging
    native: NativeRoutes
    token_in: TokenIn
    controls: SessionControls
    large_bodies: LargeBodies
    proofs: Proofs
    settings: Settings
    clock: Clock
