"""A PostgreSQL store is brought back to a moment by PostgreSQL's own tools, as docs/operations.md says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers.clusters import Cluster, folder_of_server, prepare, running, started
from helpers.databases import run_module

from integration.copying import Writers, checked, exported
from integration.stand import error_of, serving, until
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long


def test_a_base_backup_and_the_archived_log_give_the_store_of_a_moment(
    sglang: SimulatorProcess, tmp_path: Path
) -> None:
    """Everything acknowledged before the moment is there, nothing after it, and exports are the same to the byte."""
    with folder_of_server() as folder:
        base, archive = folder / "base", folder / "archive"
        for one in (folder, archive):
            prepare(one)
        archiving = f"test ! -f {archive}/%f && cp %p {archive}/%f"
        with running(archive_mode="on", archive_command=archiving) as cluster:
            environment = {"TURNLOG_DATABASE_URL": cluster.url, "TURNLOG_LEASE_S": "5"}
            with serving(tmp_path / "first", sglang.base_url, environment=environment) as stand:
                writers = Writers(stand, 4)
                until(lambda: len(writers.held) > 10)
                cluster.base_backup(base)
                seen = len(writers.held)
                until(lambda: len(writers.held) > seen + 10)
                held = writers.stop()
                rows, cursor = exported(stand), stand.http.get("/export").headers["x-turnlog-next-cursor"]
                moment = cluster.sql("SELECT now()")
                stand.talk(session_id="late").say("After the moment")
                stand.server.kill()
            cluster.sql("SELECT pg_switch_wal()")
            cluster.stop()
        with started(Cluster.recovered(base, archive, moment)) as cluster:
            until(lambda: cluster.sql("SELECT pg_is_in_recovery()") == "f")
            environment["TURNLOG_DATABASE_URL"] = cluster.url
            # Refused until the lease of the process that served at that moment has ended.
            until(
                lambda: run_module("turnlog.cli", "restore", environment={**os.environ, **environment}).returncode == 0
            )
            report = asyncio.run(checked(cluster.url, held))
            assert (report.problems, report.missing) == ([], [])
            with serving(tmp_path / "second", sglang.base_url, environment=environment) as stand:
                assert exported(stand) == rows
                assert error_of(stand.http.get("/export", params={"cursor": cursor})) == (400, "invalid_request")
                assert stand.known("late").chat([{"role": "user", "content": "Hello"}]).status_code == 404
                stand.talk(session_id="late").say("Once more")
            assert asyncio.run(checked(cluster.url, held)).problems == []
