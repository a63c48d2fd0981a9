"""What the service is made of beside the kernel: the features, their tables, and what these do in the kernel's
transactions.

A feature of `TABLES` has a module `schema`: its `metadata`, and `join`, which fills the store's points. Both count also
while `TURNLOG_FEATURES` does not name it: what a feature keeps follows the sessions in every process of a store. A
feature whose folder is gone has neither.
"""

from types import ModuleType

from sqlalchemy import MetaData

from app.features import (
    annotations,
    archive,
    budgets,
    checkpoints,
    forks,
    gates,
    groups,
    live,
    objects,
    otel,
    page,
    public_url,
    resume,
    rllm,
    run_tokens,
    runs,
    search,
    session_control,
    text,
    webhooks,
)
from app.settings import Settings
from app.store import schema
from app.store.dialect import StorePoints

FEATURES = (
    gates,
    annotations,
    archive,
    budgets,
    checkpoints,
    forks,
    groups,
    live,
    objects,
    otel,
    page,
    public_url,
    resume,
    rllm,
    run_tokens,
    runs,
    search,
    session_control,
    text,
    webhooks,
)
"""`TURNLOG_FEATURES` names those that are on. Gates come first: checkpoints and resume use them."""


TABLES = (archive, checkpoints, groups, objects, resume, run_tokens, runs, session_control)
"""Features with tables of their own, which their module `schema` has."""


def chosen(settings: Settings) -> dict[str, ModuleType]:
    """The features that are on, by their names, in the order in which they start."""
    named = {feature.__name__.rpartition(".")[2]: feature for feature in FEATURES}
    return {name: feature for name, feature in named.items() if name in settings.features}


def metadata() -> MetaData:
    """The kernel's tables and the features'."""
    every = MetaData(naming_convention=schema.NAMING)
    for part in (schema, *(feature.schema for feature in TABLES)):
        for table in part.metadata.tables.values():
            table.to_metadata(every)
    return every


def store_points() -> StorePoints:
    """What features do in the kernel's transactions."""
    points = StorePoints()
    for feature in TABLES:
        feature.schema.join(points)
    return points
