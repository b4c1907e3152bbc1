"""Looking for lost nodes among many."""

from __future__ import annotations

import contextlib
import socket
import time
from types import SimpleNamespace

import pytest

from pipelines.engines import ray_nodes
from pipelines.engines.ray_nodes import RayNodes

PROBE_SECONDS = 0.1


@pytest.fixture
def ports(monkeypatch):
    """Port of a server that accepts connections, and of one whose queue is full, so that a connection never opens."""
    monkeypatch.setattr(ray_nodes, "_PROBE_SECONDS", PROBE_SECONDS)
    with contextlib.ExitStack() as sockets:
        good, full = (sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64 * n)) for n in (1, 0))
        sockets.enter_context(socket.create_connection(full.getsockname()))
        yield good.getsockname()[1], full.getsockname()[1]


def nodes_at(*ports):
    """The nodes of a cluster that says that all of them are alive."""
    entries = [
        {"NodeID": f"node-{number}", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "Alive": True}
        for number, port in enumerate(ports)
    ]
    cluster = SimpleNamespace(ray=SimpleNamespace(nodes=lambda: entries), daemons=(), room=lambda **_: len(ports))
    return RayNodes(cluster, cpus=1, gpus=0)


def test_the_node_that_does_not_answer_is_lost(ports):
    good, full = ports
    nodes = nodes_at(good, full, good)
    assert nodes.find_lost(["node-0", "node-2"]) is None
    assert nodes.find_lost(["node-0", "node-1", "node-2"]) == "node-1"


def test_many_silent_nodes_take_as_long_as_one(ports):
    silent = ports[1]
    nodes = nodes_at(*[silent] * 40)
    started = time.monotonic()
    assert nodes.find_lost([f"node-{number}" for number in range(40)]) is not None
    assert time.monotonic() - started < 20 * PROBE_SECONDS
