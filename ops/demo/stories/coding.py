"""Coding agents: one mends a library with an editor and tests, one has a shell alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ops.demo.stories.script import Call, Hold, Session, Turn, chance, tool

REPO_GROUP, SHELL_GROUP = "swe/durations-141", "terminal/log-rotation"
ADAPTER = "shell-lora"
HOLDS: Mapping[int, Hold] = {8: "gated", 9: "stuck"}
FAULTS = {2: "status_500", 5: "not_json", 7: "status_503", 9: "nan_logprob"}

BASH = tool("bash", "Run a command in the sandbox.", command="A shell command.")
EDIT = tool("edit", "Replace a text that occurs once in a file.", path="File.", old="Text.", new="Its replacement.")
READ = tool("read_file", "Read a file with line numbers.", path="File.")
SYSTEM = """You are a coding agent in a sandbox with a checkout at `/repo`.

- Look before you edit; keep the change small.
- Run the tests after every edit.
- When you are done, say what you changed and why, in a few sentences."""
TASK = """Please fix this issue in `/repo`.

## `parse_duration` loses minutes (#141)

```python
>>> from durations import parse_duration
>>> parse_duration("1h30m")
3600            # expected 5400
>>> parse_duration("1.5h")
ValueError: invalid literal for int() with base 10: '1.5'
```

Units are `d`, `h`, `m`, `s` and `ms`. *Whitespace between parts is allowed.* The hidden tests check that

1. all parts are added,
2. fractions work,
3. an unknown unit raises `ValueError` that **names the unit**."""

LISTING = """durations
├── __init__.py
├── format.py
├── parse.py
└── units.py
tests
├── test_format.py
├── test_parse.py
└── test_units.py

2 directories, 7 files"""
LOG = """4f1c9ae (HEAD -> main) Format negative durations
b02d77e Units of SI prefixes
9e55d13 parse_duration: accept upper case
c71f0aa Initial import"""
SOURCE = '''     1\t"""Parses durations such as "1h30m"."""
     2\t
     3\timport re
     4\t
     5\tfrom durations.units import SECONDS
     6\t
     7\t_PART = re.compile(r"(\\d+)([a-z]+)")
     8\t
     9\t
    10\tdef parse_duration(text: str) -> float:
    11\t    """Seconds of a duration."""
    12\t    found = _PART.match(text.strip().lower())
    13\t    if found is None:
    14\t        raise ValueError(text)
    15\t    return int(found[1]) * SECONDS[found[2]]'''
UNITS = 'SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}'
GREP = """durations/__init__.py:3:from durations.parse import parse_duration
tests/test_parse.py:4:from durations import parse_duration
tests/test_parse.py:11:    assert parse_duration("1h30m") == 5400
tests/test_parse.py:19:    with pytest.raises(ValueError, match="fortnight"):
tests/test_parse.py:20:        parse_duration("1fortnight")"""
OLD_RETURN = "    return int(found[1]) * SECONDS[found[2]]"
FIRST_TRY = "    return sum(int(n) * SECONDS[unit] for n, unit in _PART.findall(text.lower()))"
FRACTIONS = '_PART = re.compile(r"(\\d+(?:\\.\\d+)?)\\s*([a-z]+)")'
WHOLE = """    total, end = 0.0, 0
    for found in _PART.finditer(text):
        if text[end : found.start()].strip():
            raise ValueError(f"cannot read {text[end : found.start()]!r} in {text!r}")
        number, unit = found.groups()
        if unit not in SECONDS:
            raise ValueError(f"unknown unit {unit!r}; known: {', '.join(SECONDS)}")
        total, end = total + float(number) * SECONDS[unit], found.end()
    if not end or text[end:].strip():
        raise ValueError(f"cannot read {text!r}")
    return total"""
FAILED = """_________________________________ test_all_parts_are_added _________________________________

    def test_all_parts_are_added():
>       assert parse_duration("1h30m") == 5400
E       AssertionError: assert 3600 == 5400
E        +  where 3600 = parse_duration('1h30m')

tests/test_parse.py:11: AssertionError"""
FAILED_UNIT = """____________________________________ test_unknown_unit _____________________________________

    def test_unknown_unit():
        with pytest.raises(ValueError, match="fortnight"):
>           parse_duration("1fortnight")

durations/parse.py:14: KeyError
E   KeyError: 'fortnight'"""
DONE = """All tests pass now. What I changed in `durations/parse.py`:

| case | before | now |
| --- | --- | --- |
| `1h30m` | 3600 | **5400** |
| `1.5h` | `ValueError` | 5400.0 |
| `1fortnight` | `KeyError` | `ValueError` that names `fortnight` |

```diff
-    return int(found[1]) * SECONDS[found[2]]
+        total, end = total + float(number) * SECONDS[unit], found.end()
```

The parser walks over *all* parts, and refuses what is between them. I left `format.py` alone."""
GAVE_UP = """I could not make the last test pass: `test_unknown_unit` still fails with a `KeyError`. The parts are added
and fractions work; someone should look at `SECONDS[unit]` again."""
THOUGHTS = (
    "The regular expression matches once and then the rest is dropped. findall would give every part, but then "
    "whatever stands between the parts is ignored without an error, and the issue wants errors to be useful.",
    "Still one failure. The unit is looked up in the dict, so an unknown one is a KeyError and not a ValueError. I "
    "should test for it before the lookup and put the name into the message.",
    "Let me run everything once more before I answer, format.py shares the units.",
)
NAMES = ("parts", "fraction", "whitespace", "upper_case", "negative", "days", "millis", "roundtrip", "zero", "empty")


def _pytest(passed: int, failures: Sequence[str] = (), seconds: float = 0.4) -> str:
    head = f"{' test session starts ':=^80}\ncollected {passed + len(failures)} items\n"
    dots = "." * passed + "F" * len(failures)
    middle = f"\n\n{' FAILURES ':=^80}\n" if failures else ""
    last = f"{len(failures)} failed, {passed} passed" if failures else f"{passed} passed"
    body = "\n".join(failures)
    return f"{head}\ntests/test_parse.py {dots}{middle}{body}\n\n{f' {last} in {seconds:.2f}s ':=^80}"


def _long_suite(rng: random.Random, failing: bool) -> str:
    """The output of a verbose run, which is long."""
    lines = [f"{' test session starts ':=^80}", "collected 240 items", ""]
    for number in range(240):
        file = ("test_parse", "test_format", "test_units")[number % 3]
        verdict = "FAILED" if failing and number == 187 else "PASSED"
        name = f"tests/{file}.py::test_{NAMES[number % 10]}[{rng.randint(0, 9999)}ms-{number}]"
        lines.append(f"{name:<66} {verdict} [{(number + 1) * 100 // 240:3}%]")
    lines += [
        "",
        FAILED_UNIT if failing else "",
        f"======== {'1 failed, 239' if failing else '240'} passed in 3.18s ========",
    ]
    return "\n".join(lines)


def _bash(command: str, result: str, seconds: float = 0.2) -> Call:
    return Call("bash", {"command": command}, result, seconds)


def _edit(old: str, new: str) -> Call:
    return Call(
        "edit", {"path": "durations/parse.py", "old": old, "new": new}, "1 replacement in durations/parse.py", 0.05
    )


def _test(result: str, seconds: float) -> Call:
    return _bash("pytest -q tests/test_parse.py", result, seconds)


def _repo_turns(attempt: int, rng: random.Random, solves: bool) -> list[Turn]:
    look = (_bash("cd /repo && tree", LISTING), _bash("git log --oneline | head", LOG, 0.1))
    turns = [
        Turn("I'll look at the repository first.", ask=TASK, calls=look),
        Turn(calls=[Call("read_file", {"path": "durations/parse.py"}, SOURCE, 0.05)]),
        Turn(
            "Who uses it, and what do the tests say?",
            calls=[_bash("grep -rn parse_duration .", GREP), _test(_pytest(7, [FAILED, FAILED_UNIT]), 0.9)],
        ),
    ]
    if attempt % 3 == 0:
        turns.insert(2, Turn(calls=[Call("read_file", {"path": "durations/units.py"}, UNITS, 0.05)]))
    if attempt in FAULTS:
        turns.append(Turn(fault=FAULTS[attempt]))
    if attempt == 9:
        turns.append(Turn(fault="context_400"))
    turns += [
        Turn("The pattern matches only once, so I add up every part.", THOUGHTS[0], [_edit(OLD_RETURN, FIRST_TRY)]),
        Turn(calls=[_test(_pytest(8, [FAILED_UNIT]), rng.uniform(0.5, 1.2))]),
    ]
    if attempt == 4:  # it thinks better of its edit, twice
        turns += [
            Turn("Let me try a `try`/`except KeyError` around it.", back=1, calls=[_edit(FIRST_TRY, "    try: ...")]),
            Turn("No: the unit's name would be lost.", back=1, calls=[_test(_pytest(8, [FAILED_UNIT]), 0.6)]),
        ]
    for _ in range(rng.randint(0, 2)):
        turns += [
            Turn(calls=[_edit('_PART = re.compile(r"(\\d+)([a-z]+)")', FRACTIONS)]),
            Turn(calls=[_test(_pytest(8, [FAILED_UNIT]), rng.uniform(0.4, 1.4))]),
        ]
    if attempt == 8:
        turns.append(Turn(WHOLE * 3, THOUGHTS[1], fault="abort"))
        return turns
    if solves:
        turns += [
            Turn("", THOUGHTS[1], [_edit(FIRST_TRY, WHOLE)]),
            Turn(calls=[_test(_pytest(9), rng.uniform(0.5, 1.0)), _bash("ruff check .", "All checks passed!", 0.3)]),
        ]
    turns.append(Turn("", THOUGHTS[2], [_bash("pytest -v", _long_suite(rng, not solves), rng.uniform(1.2, 2.2))]))
    turns.append(Turn(DONE if solves else GAVE_UP))
    return turns


def repository(count: int = 12) -> list[Session]:
    sessions = []
    for attempt in range(count):
        rng = chance(REPO_GROUP, attempt)
        solves = attempt % 5 not in (1, 3) and attempt != 8
        running = attempt == count - 1
        turns = _repo_turns(attempt, rng, solves)
        create = {
            "session_id": f"swe-durations-{attempt:02}",
            "group_id": REPO_GROUP,
            "attempt": attempt,
            "rollback_window": 3,
            "metadata": {"task": "durations-141", "harness": "mini-swe", "image": "py311-slim", "split": "train"},
        }
        notes = {"note": "Solved in the fewest turns.", "tags": ["best"]} if attempt == 0 else {}
        if attempt == 3:
            notes = {"note": "Gives up although the message names the line.", "tags": ["loops", "look-again"]}
        sessions.append(
            Session(
                create,
                SYSTEM,
                turns[: len(turns) * 2 // 3] if running else turns,
                (BASH, EDIT, READ),
                reward=None if running else float(solves),
                components={"tests": float(solves), "length": round(-0.01 * len(turns), 2), "lint": 0.1 * solves},
                closes=not running,
                hold="running" if running else None,
                notes=notes,
                verdicts={5: {"helpful": solves, "score": 4 if solves else 2}} if attempt < 6 else {},
                columns=("teacher_logprobs", "advantages") if attempt < 6 else ("advantages",) * (not running),
            )
        )
    return sessions


SHELL_SYSTEM = "You administer a Linux host through a shell. One command at a time. Say DONE when the task is done."
SHELL_TASK = """`/var` is full and nginx has stopped logging. Free the space **without losing today's logs**,
and keep it from happening again."""
DF = """Filesystem      Size  Used Avail Use% Mounted on
/dev/vda1        40G   11G   27G  29% /
/dev/vda2        20G   20G   12K 100% /var
tmpfs           2.0G     0  2.0G   0% /dev/shm"""
DU = """9.8G\t/var/log/nginx/access.log.1
6.1G\t/var/log/nginx/access.log
1.9G\t/var/log/journal
412M\t/var/cache/apt"""
ROTATE = """/var/log/nginx/*.log {
    daily
    rotate 7
    maxsize 200M
    compress
    missingok
    postrotate
        [ -f /run/nginx.pid ] && kill -USR1 $(cat /run/nginx.pid)
    endscript
}"""


def _access_log(rng: random.Random, lines: int) -> str:
    paths = ("/", "/api/items", "/login", "/static/app.js", "/api/items/17", "/health")
    return "\n".join(
        f"10.0.{rng.randint(0, 9)}.{rng.randint(1, 254)} - - [12/Mar/2026:09:{n // 60 % 60:02}:{n % 60:02} +0000] "
        f'"GET {rng.choice(paths)} HTTP/1.1" {rng.choice((200, 200, 200, 304, 404, 502))} {rng.randint(90, 90000)}'
        for n in range(lines)
    )


def shell(count: int = 10) -> list[Session]:
    sessions = []
    for attempt in range(count):
        rng = chance(SHELL_GROUP, attempt)
        commands = [
            ("df -h", DF, 0.1),
            ("du -ah /var | sort -rh | head -4", DU, rng.uniform(0.6, 1.6)),
            (f"tail -{120 + 40 * attempt} /var/log/nginx/access.log", _access_log(rng, 120 + 40 * attempt), 0.2),
            (
                "cat /etc/logrotate.d/nginx",
                "cat: /etc/logrotate.d/nginx: No such file or directory\n[exit code 1]",
                0.05,
            ),
            (
                "gzip /var/log/nginx/access.log.1",
                "gzip: /var/log/nginx/access.log.1.gz: No space left on device\n[exit code 1]",
                0.5,
            ),
            ("apt-get clean && journalctl --vacuum-size=200M", "Vacuuming done, freed 1.7G of archived journals.", 0.9),
            ("mv /var/log/nginx/access.log.1 /root/ && gzip /root/access.log.1", "", rng.uniform(0.8, 2.0)),
            (f"cat > /etc/logrotate.d/nginx <<'EOF'\n{ROTATE}\nEOF", "", 0.05),
            (
                "logrotate -d /etc/logrotate.d/nginx 2>&1 | tail -3",
                "considering log /var/log/nginx/access.log\n  log needs rotating",
                0.3,
            ),
            ("systemctl reload nginx && df -h /var", DF.replace("20G   12K 100%", "8.1G   11G  42%"), 0.4),
        ]
        skipped = rng.sample(range(3, 9), attempt % 4)
        turns = [
            Turn(
                ""
                if n % 2
                else (
                    "Which file system is full?",
                    "It is nginx's log.",
                    "Compress it.",
                    "Now the configuration.",
                    "Check.",
                )[n // 2],
                calls=[_bash(command, result, seconds)],
                ask=SHELL_TASK if n == 0 else "",
            )
            for n, (command, result, seconds) in enumerate(commands)
            if n not in skipped
        ]
        hold = HOLDS.get(attempt)
        if attempt in (1, 6):
            turns.insert(3, Turn(fault="missing_logprobs"))
        if attempt == 3:
            turns.append(
                Turn("DONE. " + "I also looked at every other service on the host. " * 40, fields={"max_tokens": 160})
            )
        elif hold is None:
            turns.append(Turn(f"DONE: `/var` is at 42 %, and logs are rotated at 200 MB.\n\n```\n{ROTATE}\n```"))
        else:
            turns = turns[:4]
        reward = round(1 - 0.25 * len(skipped), 2)
        sessions.append(
            Session(
                {
                    "session_id": f"terminal-logs-{attempt:02}",
                    "group_id": SHELL_GROUP,
                    "attempt": attempt,
                    "metadata": {"task": "log-rotation", "harness": "terminus", "split": "train"},
                    **({"adapter": ADAPTER} if attempt >= count - 3 else {}),
                },
                SHELL_SYSTEM,
                turns,
                (BASH,),
                reward=None if hold else reward,
                components={"space": 1.0, "kept": 1.0 - 0.25 * len(skipped)},
                closes=hold is None,
                hold=hold,
            )
        )
    return sessions
