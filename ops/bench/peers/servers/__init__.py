"""The servers that the benchmark knows, by name, in the order of the table."""

from collections.abc import Mapping

from ops.bench.peers.protocol import Peer
from ops.bench.peers.servers.engine import EngineAlone
from ops.bench.peers.servers.turnlog import Turnlog

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        EngineAlone(),
        Turnlog("turnlog-sqlite"),
        Turnlog("turnlog-postgres", postgres=True),
    )
}
