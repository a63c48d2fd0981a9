"""`nvext.session_control`: clients bind engines to a name, and engines hold sessions under it (Dynamo).

    a turn with a claim     uses its name, and chooses the engine by it   (`TurnPoints.claimed`, `placing`)
    a turn that has ended   releases it                                   (`TurnPoints.ended`)
    a close                 ends the name that the session used last      (`Sessions.on_close`)
    a close's transaction   has the engine told, where it held a session by itself   (`StorePoints.closed`)
    in the background       names whose time is over, and those of dead processes

The table `affinities` is written here alone; requests are parsed by the kernel (`domain.control`). Without this feature
the field has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.features.session_control import schema as schema

if TYPE_CHECKING:
    from app.features.session_control.controls import SessionControls
    from app.services import Services


def add_to(services: Services) -> SessionControls:
    from app.features.session_control.controls import SessionControls
    from app.upstream.sessions import EngineSessions

    controls = SessionControls(
        database=services.database,
        writer=services.writer,
        cache=services.cache,
        engines=services.engines,
        calls=EngineSessions(services.client, services.settings.upstream_api_key),
        settings=services.settings,
        incarnation=services.registration.incarnation,
        lease_s=services.recovery.lease_to_judge_by,
    )
    services.points.claimed.append(controls.claimed)
    services.points.placing.append(controls.placing)
    services.points.ended.append(controls.ended)
    services.sessions.on_close(controls.session_closed)
    services.registered_calls.append(controls.start)
    services.turn_ends.append(controls.stop)
    return controls
