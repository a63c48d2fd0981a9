"""`python -m compat.make TREE FILE`, in `tests/`: the release whose code is in TREE writes a store, and says all of it.

The store is copied before it is asked, because some questions write: the copy is as a stopped server left it.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

from integration.stand import Stand
from integration.tito import tokenizer_folder

from compat.answers import QUIET, STORE, Archive, Asker, pack
from compat.story import CHAPTERS, Chapter
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess


def write(tree: Path, folder: Path) -> None:
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    tokenizer_folder(tokenizer)
    for number, chapter in enumerate(CHAPTERS, 1):
        with SimulatorProcess("--seed", str(number), "--dialect", chapter.dialect) as engine:
            server = ServerProcess(
                folder, upstreams=[engine.base_url], environment=_environment(chapter, tokenizer), root=tree
            )
            with server:
                stand = Stand(server, engine.base_url)
                chapter.tell(stand)
                stand.close()
    with contextlib.closing(sqlite3.connect(folder / STORE)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.execute("VACUUM")


def _environment(chapter: Chapter, tokenizer: Path) -> dict[str, str]:
    given = {**QUIET, **chapter.environment}
    return {**given, "TURNLOG_TOKENIZER": str(tokenizer)} if chapter.tokenizer else given


def ask(tree: Path, folder: Path) -> Asker:
    with ServerProcess(folder, environment=QUIET, root=tree) as server:
        stand = Stand(server, "")
        asker = Asker(stand, None)
        asker.everything()
        stand.close()
    return asker


def main(tree: Path, to: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        written, asked = Path(name, "written"), Path(name, "asked")
        written.mkdir()
        asked.mkdir()
        write(tree, written)
        shutil.copyfile(written / STORE, asked / STORE)
        asker = ask(tree, asked)
        assert asker.cursor is not None
        pack(Archive((written / STORE).read_bytes(), asker.answers, asker.cursor), to)
    print(f"{to}: {len(asker.answers)} answers, {to.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
