"""`python -m turnlog.keeper PLAN`: what `turnlog serve` becomes once all is in order. It ends as its servers do."""

from __future__ import annotations

import os
import signal
import sys

from turnlog.keeper import siblings
from turnlog.keeper.keep import STOPS, Keeper
from turnlog.keeper.plan import Plan


def main() -> int:
    plan = Plan.read(sys.argv[1])
    for descriptor in plan.sockets:
        os.set_inheritable(descriptor, False)
    with siblings.folder(plan):
        code = Keeper(plan).run()
    if code == -signal.SIGINT:
        return 0
    if -code in STOPS:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
