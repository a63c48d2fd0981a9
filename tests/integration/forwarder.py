"""A forwarder for the tests of `turnlog expose`: `forwarder.py SERVER_PORT FOLDER`.

It listens at the port that the file `port` of the folder names, without it at a free one, and prints its address. If
the file `cut` is there when a chat's reply comes, it removes it, passes 20 bytes of the reply on, and dies.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path

SAID = "open http://127.0.0.1:4040 to inspect, \x1b[1mhttp://{}:{}\x1b[0m is yours."


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    chosen = folder / "port"
    listener = socket.create_server(("", int(chosen.read_text()) if chosen.exists() else 0))
    print(SAID.format(socket.gethostname(), listener.getsockname()[1]), flush=True)
    print("and on the other stream", file=sys.stderr, flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        chats = threading.Event()
        for pair in ((client, server), (server, client)):
            threading.Thread(target=passing, args=(*pair, chats, folder / "cut", pair[0] is client)).start()


def passing(source: socket.socket, target: socket.socket, chats: threading.Event, cut: Path, is_request: bool) -> None:
    with contextlib.suppress(OSError), source, target:
        while data := source.recv(1 << 16):
            if is_request and b"/chat/completions" in data:
                chats.set()
            elif not is_request and chats.is_set() and cut.exists():
                cut.unlink()
                target.sendall(data[:20])
                os._exit(1)
            target.sendall(data)


if __name__ == "__main__":
    main()
