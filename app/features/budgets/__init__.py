"""Budgets: limits of a session or a rollout on turns, sampled tokens, context and time, kept while it runs.

    a claim          reserves what its turn may sample, or is refused with 409   (`TurnPoints.limits`)
    a generation     asks for no more than that, and ends with the time          (`SessionLimits.around`)
    a commit         counts what was sampled; every other end gives all of it back
    a session's GET  says what holds for it, what is used and what is left       (`Services.session_fields`)

What holds for a session is in its log (`Session.budgets`); one without limits meets one test on its way. The columns
are `sessions.spent_turns`, `sessions.spent_tokens` and `open_turns.reserved`. Without this feature no session can be
created with limits, and those that have some are not held to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.features.budgets.budgets import Budgets
    from app.services import Services


def add_to(services: Services) -> Budgets:
    from app.features.budgets.budgets import Budgets

    budgets = Budgets(services)
    services.points.limits = budgets
    services.session_fields.append(budgets.fields)
    return budgets
