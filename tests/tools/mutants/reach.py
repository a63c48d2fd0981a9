"""Which test modules run which functions, so that a fault is shown to those alone that can find it.

`sitecustomize` is laid into a copy of the tree: every Python process that starts there notes the functions that it
calls for the module whose tests run then. That is also a plugin of pytest, which says which module that is.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.tools.mutants.copies import Copy
from tests.tools.mutants.edits import Mutant
from tests.tools.mutants.families import MARK, Family, end_all

HOOK = Path(__file__).with_name("noted_calls.py")

ALL = "all"
"""Stands for the module of a family that always runs as a whole."""


class Module(msgspec.Struct):
    """Of a test module: how long it takes, whether its tests pass without a fault, and "<file> <function>" of each
    function that they call."""

    seconds: float
    passes: bool
    calls: list[str]


Reach = dict[str, dict[str, Module]]
"""By family and test module."""


def read_reach(file: Path) -> Reach:
    """What `trace` has written."""
    return msgspec.json.decode(file.read_bytes(), type=Reach) if file.exists() else {}


def trace(name: str, family: Family, tree: Path, file: Path, *, schedules: int) -> None:
    """Run a family without a fault and add to `file` what each of its modules calls, or what all of it does.

    What none of the schedules calls, more of them hardly do.
    """
    copy = Copy(tree)
    (copy.root / "sitecustomize.py").write_text(HOOK.read_text())
    notes = copy.base / "notes"
    notes.mkdir()
    command = [part for part in family.on(copy, range(1, 1 + schedules), None) if part != "-x"]
    modules = [ALL]
    if family.tests is None:
        (notes / "now").write_text(ALL)
    else:
        modules = sorted(str(one.relative_to(copy.root)) for one in copy.root.glob(family.tests))
        command += ["-p", "sitecustomize"]
    environment = {**os.environ, "PYTHONPATH": str(copy.root), "MUTANTS_NOTES": str(notes), "TMPDIR": str(copy.scratch)}
    environment[MARK] = mark = f"trace-{os.getpid()}"
    try:
        done = subprocess.run(command, cwd=copy.root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{name} cannot be traced: {(done.stdout + done.stderr)[-500:]}")
        lines = [line.split(" ") for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        failed = {test.split("::")[0] for _, test, *_ in lines} | ({ALL} if done.returncode else set())
        reach = read_reach(file)
        reach[name] = {module: _module(notes / module.replace("/", "."), module not in failed) for module in modules}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(reach))
    finally:
        end_all(mark)
        copy.close()
    calling = sum(module.passes and bool(module.calls) for module in reach[name].values())
    print(f"{name}: {calling} of {len(modules)} modules pass and call the service; failed: {sorted(failed)}")


def _module(notes: Path, passes: bool) -> Module:
    lines = notes.read_text().splitlines() if notes.exists() else []
    seconds = sum(float(line.split()[1]) for line in lines if line.startswith("seconds "))
    return Module(seconds, passes, sorted({line for line in lines if not line.startswith("seconds ")}))


def choose(mutant: Mutant, modules: dict[str, Module], tree: Path) -> list[str]:
    """The test modules that run a fault, quickest first; of those that failed without it none."""
    calls = callers(mutant, tree)
    chosen = [name for name, module in modules.items() if module.passes and not calls.isdisjoint(module.calls)]
    return sorted(chosen, key=lambda name: modules[name].seconds)


def callers(mutant: Mutant, tree: Path) -> set[str]:
    """Where a fault is run: its function, or for a statement outside functions all that name what it defines."""
    users, functions = _users(tree)
    if f"{mutant.path} {mutant.function}" in functions:
        return {f"{mutant.path} {mutant.function}"}
    found, names, seen = set[str](), [mutant.function.split(".")[0]], set[str]()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for user in users[name]:
            if user in functions:
                found.add(user)
            else:
                names.append(user)
    return found


_READ: dict[Path, tuple[dict[str, set[str]], set[str]]] = {}


def _users(tree: Path) -> tuple[dict[str, set[str]], set[str]]:
    """By name the functions that use it, and the names that are defined by it outside of functions; all functions."""
    if tree not in _READ:
        users: dict[str, set[str]] = defaultdict(set)
        functions = set[str]()
        for file in (tree / "app").rglob("*.py"):
            path = str(file.relative_to(tree))
            _read(ast.parse(file.read_text()).body, path, (), users, functions)
        _READ[tree] = users, functions
    return _READ[tree]


def _read(
    body: Sequence[ast.stmt], path: str, outer: tuple[str, ...], users: dict[str, set[str]], functions: set[str]
) -> None:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            _read(statement.body, path, (*outer, statement.name), users, functions)
            continue
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            user = f"{path} {'.'.join((*outer, statement.name))}"
            functions.add(user)
            inner = [one for one in statement.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            _read(inner, path, (*outer, statement.name), users, functions)
        else:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            names = [one.id for one in targets if isinstance(one, ast.Name)]
            user = outer[0] if outer else names[0] if names else ""
        for node in ast.walk(statement):
            for name in (getattr(node, "id", None), getattr(node, "attr", None)):
                if isinstance(name, str) and user and name != user:
                    users[name].add(user)
