"""Features against the lists that name them: the composition, the settings, and the schema's tables."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest

from app import composition, features
from app.composition import chosen
from app.domain.fleet import Fleet, TurnsHeld
from app.errors import StartupError
from app.features import checkpoints
from app.main import create_app
from app.services import Services
from app.settings import FEATURES, Settings, load_settings

FOLDERS = {path.parent.name for path in Path(features.__file__).parent.glob("*/__init__.py")}


class Part(NamedTuple):
    """What becomes of a table's rows: `module:name` of the code that does it, or why nothing needs to be done."""

    of: str
    erase: str
    fork: str
    restore: str


NO_SESSION = "no: it holds nothing of a session"
LATER = "no: it is of what happens from now on"
MADE = "app.features.checkpoints.operations:Make"
LOG = "app.features.checkpoints.operations:RestoreSession"
OF_GROUPS = "app.features.checkpoints.operations:RestoreGroups"
COPIED = "app.features.forks.operation:Fork"

TABLES = {
    "store_meta": Part("kernel", NO_SESSION, NO_SESSION, "app.features.checkpoints.operations:FinishRestore"),
    "incarnations": Part("kernel", NO_SESSION, NO_SESSION, LATER),
    "leases": Part("kernel", NO_SESSION, NO_SESSION, LATER),
    "sessions": Part("kernel", "app.store.statements:erase_head", COPIED, LOG),
    "erased_runs": Part("kernel", "app.features.runs.operations:RunErased", NO_SESSION, LATER),
    "open_turns": Part("kernel", "no: a closed session has none", "no: a fork has no turn in flight", LOG),
    "events": Part("kernel", "app.store.log_sessions:erase_remaining", COPIED, LOG),
    "turns": Part("kernel", "app.store.statements:drop_content", COPIED, "no: content stays, events refer to it"),
    "blobs": Part("kernel", "app.store.statements:drop_content", COPIED, "no: content stays, events refer to it"),
    "refused_replies": Part("kernel", "app.store.statements:drop_content", "no: for diagnosis alone", "no: as before"),
    "snapshots": Part("kernel", "app.store.statements:drop_content", "no: it is made again", "no: a fold skips it"),
    "annotation_columns": Part("annotations", "app.store.statements:drop_content", COPIED, "no: what a cut has stays"),
    "chunks": Part("replay", "app.store.statements:drop_content", COPIED, "no: a tombstone stays one"),
    "staged_tokens": Part(
        "resume", "app.features.resume.schema:drop", "no: of a turn in flight", "app.store.log:abandon"
    ),
    "dead_objects": Part(
        "objects", "app.features.objects.schema:queue_erased", "app.features.objects.objects:Copies.take", LATER
    ),
    "archived": Part(
        "archive", "app.features.archive.archive:Archive.erase", "app.features.archive.schema:DEPARTED", LATER
    ),
    "fleet_events": Part("kernel", NO_SESSION, NO_SESSION, "no: engines and gates are as they are now"),
    "affinities": Part("session_control", "no: its engine and its times alone", "no: a fork is bound anew", LATER),
    "groups": Part(
        "groups",
        "app.features.groups.operations:Settle",
        "app.features.groups.operations:Settle",
        OF_GROUPS,
    ),
    "group_changes": Part(
        "groups",
        "app.features.groups.schema:note",
        "app.features.groups.schema:note",
        OF_GROUPS,
    ),
    "runs": Part("runs", NO_SESSION, NO_SESSION, LATER),
    "run_tokens": Part("run_tokens", NO_SESSION, NO_SESSION, LATER),
    "checkpoints": Part("checkpoints", NO_SESSION, NO_SESSION, MADE),
    "checkpoint_sessions": Part(
        "checkpoints",
        "no: ids and numbers alone",
        "no: a fork is a new session",
        "app.features.checkpoints.operations:Make",
    ),
    "checkpoint_groups": Part("checkpoints", NO_SESSION, NO_SESSION, MADE),
}


def test_every_table_has_its_part_in_erasures_forks_and_restores() -> None:
    assert set(TABLES) == set(composition.metadata().tables)


@pytest.mark.parametrize("table", TABLES)
def test_what_is_said_of_a_table_is_there(table: str) -> None:
    for where in TABLES[table][1:]:
        if where.startswith("no: "):
            continue
        module, _, name = where.partition(":")
        made = importlib.import_module(module)
        for part in name.split("."):
            made = getattr(made, part)
    owner = TABLES[table].of
    if owner in FOLDERS:  # and is used there
        source = "".join(path.read_text() for path in (Path(features.__file__).parent / owner).glob("*.py"))
        assert table in source


def test_each_folder_is_in_the_composition_and_may_be_named() -> None:
    assert set(chosen(Settings(features=FEATURES))) == set(FEATURES) == FOLDERS


def test_all_is_each_but_what_changes_others_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, on in (("all", set(FEATURES) - {"rllm"}), ("all,rllm", set(FEATURES)), ("rllm", {"rllm"})):
        monkeypatch.setenv("TURNLOG_FEATURES", named)
        assert set(load_settings().features) == on
    monkeypatch.delenv("TURNLOG_FEATURES")
    assert set(load_settings().features) == set(FEATURES) - {"rllm", "search"}


def test_settings_of_what_is_off_have_their_defaults() -> None:
    given = Settings(features=("page",), payloads="file:///payloads", payloads_keep_s=5, retain_until_ack=True)
    assert (given.payloads, given.payloads_keep_s, given.retain_until_ack) == ("database", 600, False)
    assert Settings(features=("objects",), payloads="file:///payloads").payloads == "file:///payloads"


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_off_has_no_routes(name: str) -> None:
    feature = chosen(Settings(features=(name,)))[name]
    others = tuple(other for other in FEATURES if other != name)
    routes = {route.path for route in create_app(Settings(features=others)).table.routes}
    own = {route.path for route in feature.entries()} if hasattr(feature, "entries") else set()
    assert not routes & own
    assert routes | own == {route.path for route in create_app(Settings(features=FEATURES)).table.routes}


@pytest.mark.anyio
async def test_a_store_that_is_being_restored_is_not_served_without_checkpoints() -> None:
    def services(held: TurnsHeld) -> Services:
        return cast(Services, SimpleNamespace(fleet=SimpleNamespace(fleet=Fleet(held={held.run: held}))))

    await checkpoints.absent(services(TurnsHeld("one", "drain", 1)))
    with pytest.raises(StartupError, match="checkpoint one is being restored"):
        await checkpoints.absent(services(TurnsHeld("one", "restore", 1, "before-1-one")))
