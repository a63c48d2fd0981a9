"""What metrics, logs and authentication cost a turn: the server's CPU with them, beside the last commit without them.

Each request has a token, as the OpenAI SDKs send one in any case; the server without authentication ignores it.
"""

from __future__ import annotations

import argparse
import secrets

from ops.bench import versions

WITHOUT = "13f11f8"
"""The last commit that counted nothing, wrote no lines of its own and let everybody in."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    versions.add_arguments(parser, WITHOUT)


async def main(arguments: argparse.Namespace) -> int:
    token = secrets.token_urlsafe(32)
    return await versions.compare(
        arguments,
        "observed",
        settings={"TURNLOG_ADMIN_TOKEN": token},
        headers=f"authorization: Bearer {token}\r\n",
    )
