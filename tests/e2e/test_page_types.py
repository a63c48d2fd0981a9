"""The page's JavaScript under the TypeScript compiler, and its types against what the server answers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.features.page.files import FOLDER
from e2e.page import PageStand
from e2e.page_data import CHECKPOINT, RUN

deno = pytest.importorskip("deno", reason="deno, which brings the TypeScript compiler, is not installed")

CONFIG = FOLDER.with_name("jsconfig.json")
TYPES = FOLDER.with_name("ui_types.d.ts")

FAULTS = {
    "TS7006": "export function twice(value) { return value; }",
    "TS2551": "/** @param {SessionRow} row */ export function changed(row) { return row.updated_att; }",
    "TS18047": "/** @param {SessionRow} row */ export function waits(row) { return row.running_since + 1; }",
    "TS2532": "/** @param {SessionRow[]} rows */ export function first(rows) { return rows[0].turns; }",
}
"""A parameter without a type, a misspelt field, a null and a missing item that nobody checked for."""

Check = Callable[[Sequence[Path]], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """`tsc --noEmit -p app/features/page/jsconfig.json`, by the compiler in deno; nothing is fetched."""
    command = [deno.find_deno_bin(), "check", "--no-remote", "--no-npm", "--config", str(CONFIG)]
    cache = tmp_path_factory.mktemp("deno")
    environment = {**os.environ, "DENO_DIR": str(cache), "DENO_NO_UPDATE_CHECK": "1", "NO_COLOR": "1"}

    def run(files: Sequence[Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *map(str, files)], env=environment, capture_output=True, text=True, timeout=120
        )

    return run


def test_the_page_has_no_type_error(check: Check) -> None:
    found = check(sorted(set(FOLDER.glob("*.js")) - set(FOLDER.glob("*.min.js"))))
    assert found.returncode == 0, found.stderr


def test_type_errors_are_found(check: Check, tmp_path: Path) -> None:
    """So that the test above can fail."""
    file = tmp_path / "faults.js"
    file.write_text("\n".join([f'/** @import {{SessionRow}} from "{TYPES}" */', *FAULTS.values()]))
    found = check([file])
    assert found.returncode != 0
    assert [code for code in FAULTS if code not in found.stderr] == []
    assert f"Found {len(FAULTS)} errors" in found.stderr


@pytest.mark.long
def test_the_types_are_what_the_server_answers(check: Check, page_stand: PageStand, tmp_path: Path) -> None:
    """Each answer as a literal of its type: a field that is missing, unknown or of another type is an error."""
    answers = [(name, page_stand.stand.http.get(path).json()) for name, path in _requests(page_stand)]
    summaries = page_stand.stand.http.get(
        "/ui/api/summaries", params={"session_id": [page_stand.filled.tree, page_stand.filled.erased]}
    )
    answers += [("Summary", one) for one in summaries.json().values()]
    log = page_stand.stand.http.get(f"/sessions/{page_stand.filled.rolled_back}/events")
    answers += [("LogEvent", json.loads(line)) for line in log.content.splitlines()]
    file = tmp_path / "answers.ts"
    file.write_text(f'import type * as api from "{TYPES}";\n' + "".join(map(_constant, range(len(answers)), answers)))
    found = check([file])
    assert found.returncode == 0, found.stderr


def _requests(page_stand: PageStand) -> list[tuple[str, str]]:
    """Types, and addresses whose answers have them."""
    filled = page_stand.filled
    found = [
        ("Me", "/ui/api/me"),
        ("Overview", "/ui/api/overview"),
        ("Overview", f"/ui/api/overview?run={RUN}"),
        ("RunPage", "/runs"),
        ("RunView", f"/ui/api/runs/{RUN}"),
        ("SessionPage", "/ui/api/sessions"),
        ("GroupPage", "/groups"),
        ("ExportPreview", "/ui/api/exports?shape=slime&max_seq_len=100"),
        ("CheckpointList", "/checkpoints"),
        ("CheckpointPage", f"/ui/api/checkpoints/{CHECKPOINT}?limit=3"),
    ]
    found += [("Group", f"/groups/{group}") for group in filled.groups]
    for session_id in (
        filled.rolled_back,
        filled.tree,
        filled.refused,
        filled.erased,
        filled.idle,
        filled.held,
        filled.in_turn[0],
    ):
        path = f"/ui/api/sessions/{session_id}"
        found += [("Session", path), ("Transcript", f"{path}/conversation"), ("TokenPage", f"{path}/tokens")]
        found += [("Comparison", f"/ui/api/rollouts?rollout={session_id}&rollout={filled.tree}&rollout=nobody")]
        found += [("StepTexts[]", f"/ui/api/rollouts/texts?step={session_id}/0"), ("TurnActions[]", f"{path}/actions")]
        found.append(("TurnMessages[]", f"{path}/turns"))
        found.append(("Tree", f"/sessions/{session_id}/tree"))
    return found


def _constant(number: int, answer: tuple[str, Any]) -> str:
    name, value = answer
    return f"export const answer{number}: api.{name} = {json.dumps(value)};\n"
