"""The servers that the benchmark knows, by name, in the order of the table."""

from collections.abc import Mapping

from ops.bench.peers.protocol import Peer
from ops.bench.peers.servers.engine import EngineAlone
from ops.bench.peers.servers.litellm import LiteLLM
from ops.bench.peers.servers.miles import Miles
from ops.bench.peers.servers.rllm import Gateway
from ops.bench.peers.servers.turnlog import Turnlog
from ops.bench.peers.servers.verifiers import Verifiers

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        EngineAlone(),
        Turnlog("turnlog-sqlite"),
        Turnlog("turnlog-postgres", postgres=True),
        Gateway("rllm-memory", "memory"),
        Gateway("rllm-sqlite", "sqlite"),
        Gateway("rllm-sqlite-sync", "sqlite", sync_traces=True),
        Miles("v1"),
        Miles("v2"),
        Verifiers(),
        LiteLLM(),
    )
}
