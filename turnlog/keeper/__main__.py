"""`python -m turnlog.keeper OPTIONS`: the keeper as a process. It ends as its servers do."""

from __future__ import annotations

import os
import signal
import sys

from turnlog.keeper.metrics_folder import metrics_folder
from turnlog.keeper.options import ServeOptions
from turnlog.keeper.supervise import STOPS, Keeper


def main() -> int:
    options = ServeOptions.from_json(sys.argv[1])
    for descriptor in options.sockets:
        os.set_inheritable(descriptor, False)
    with metrics_folder(options):
        code = Keeper(options).run()
    if code == -signal.SIGINT:
        return 0
    if -code in STOPS:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
