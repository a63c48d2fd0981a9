"""`python -m tests.tools.tito_check`: chat templates, and how many prompts of random conversations are right.

1 if one is wrong. The templates: those of the package `trl`, and of what `pip download` put into `--templates`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from app.errors import StartupError
from app.tito import loading
from app.tito.prompts import Prompts
from tests.tools.tito_check import templates, tokenizers
from tests.tools.tito_check.check import Check
from tests.tools.tito_check.conversations import KINDS, What


def check(folder: Path, source: str) -> Check:
    """A check of a template on a tokenizer made for it. Raises StartupError where the server would not start."""
    tokenizer, stops = loading.tokenizer(str(tokenizers.save_with(folder, source)))
    return Check(Prompts(tokenizer, stops), tokenizer, stops)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.tools.tito_check", description=__doc__)
    parser.add_argument("--templates", type=Path, help="a folder of .jinja files and downloaded packages")
    parser.add_argument("--conversations", type=int, default=100, help="a template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--what", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--only", nargs="*", default=[""], help="templates whose names hold one of these")
    options = parser.parse_args()
    sources = templates.every(options.templates)
    if not sources:
        parser.error("no templates: pip install --no-deps trl, or --templates (see tests/README.md)")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Check | str] = {}
        for number, (name, source) in enumerate(sources.items()):
            if any(part in name for part in options.only):
                try:
                    made[name] = check(Path(folder) / str(number), source)
                except StartupError as error:
                    made[name] = str(error)
        for what in options.what:
            wrong += table(what, made, options.conversations, options.seed)
    return 1 if wrong else 0


def table(what: What, checks: dict[str, Check | str], conversations: int, seed: int) -> int:
    """Prints a row a template, and returns how many prompts were wrong."""
    print(f"\n{what}\n{'template':<56} conversations  later turns  wrong  refused  why")
    sums = Counter[str]()
    for name, family in checks.items():
        if isinstance(family, str):
            print(f"{name:<56} {'the start is refused: ' + family}")
            sums["not started"] += 1
            continue
        family.begin()
        for number in range(conversations):
            family.conversation(f"{seed}/{number}", what)
        refused = family.refused.total()
        why = "; ".join(f"{reason} ({count})" for reason, count in family.refused.most_common(3))
        print(f"{name:<56} {conversations:>13} {family.turns:>12} {len(family.wrong):>6} {refused:>8}  {why}")
        if family.wrong:
            print(f"    wrong: conversation {family.wrong[0]}")
        sums += Counter(templates=1, right=not family.wrong and not refused, turns=family.turns)
        sums += Counter(conversations=conversations, wrong=len(family.wrong), refused=refused)
    print(
        f"{what}: {sums['templates']} templates ({sums['not started']} more not started), {sums['conversations']} "
        f"conversations, {sums['turns']} later turns, wrong {sums['wrong']}, refused {sums['refused']}; "
        f"{sums['right']} templates right on every turn"
    )
    return sums["wrong"]


if __name__ == "__main__":
    sys.exit(main())
