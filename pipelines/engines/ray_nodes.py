"""The nodes of a Ray cluster: how many workers they have room for, and which of them are lost."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipelines.engines.base import Notice, describe_error
from pipelines.engines.ray_cluster import RayCluster, room_on_node
from pipelines.progress.wording import counted, duration
from storage_formats.errors import EdjeError

NODE_WAIT_SECONDS = 600.0
"""A job ends with an error if its cluster lacks room for its workers for this long."""

_REFRESH_SECONDS = 2.0
_PROBE_SECONDS = 2.0
_PROBE_THREADS = 64


class RayNodes:
    """The nodes that can run workers of a job. The nodes of a local Ray never change.

    Args:
        cluster: connection to Ray.
        cpus: CPUs per worker.
        gpus: GPUs per worker.
        min_workers: number of workers without which the job makes no progress.
        wait_seconds: seconds without room for `min_workers` workers after which `refresh` raises an error.

    Raises:
        UsageError: every node is too small for a worker.
    """

    def __init__(
        self,
        cluster: RayCluster,
        *,
        cpus: int,
        gpus: int,
        min_workers: int = 1,
        wait_seconds: float = NODE_WAIT_SECONDS,
    ) -> None:
        self._ray = cluster.ray
        self.is_fixed = bool(cluster.daemons)
        self._needs = {"cpus": cpus, "gpus": gpus}
        self._min_workers = min_workers
        self._wait_seconds = wait_seconds
        self._room_at_start = cluster.room(**self._needs)
        self._lost: set[str] = set()
        self._nodes: dict[str, dict[str, Any]] = {}
        self._refreshed_at = self._had_room_at = time.monotonic()
        self._read()

    @property
    def room(self) -> int:
        """Number of workers that the nodes can run at the same time."""
        if self.is_fixed:
            return self._room_at_start
        return sum(room_on_node(node["Resources"], **self._needs) for node in self._nodes.values())

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the nodes that are not lost."""
        return frozenset(self._nodes)

    def address(self, node_id: str) -> str:
        """Return the address of a node that is or was in the cluster."""
        return next((str(node["NodeManagerAddress"]) for node in self._all() if node["NodeID"] == node_id), "")

    def refresh(self) -> Iterator[Notice]:
        """Look which nodes joined or left, at most every two seconds. Yield a notice for each of them.

        Raises:
            EdjeError: there has been no room for `min_workers` workers for `wait_seconds`, or the cluster does not
                answer.
        """
        if self.is_fixed or time.monotonic() - self._refreshed_at < _REFRESH_SECONDS:
            return
        before, room_before = self._nodes, self.room
        self._read()
        changed = [(node, "joined") for node in self._nodes.keys() - before.keys()]
        changed += [(node, "left") for node in before.keys() - self._nodes.keys()]
        for node_id, change in changed:
            node = self._nodes.get(node_id) or before[node_id]
            yield Notice(
                f"node {node['NodeManagerAddress']} {change} the cluster, which now has room for "
                f"{counted(self.room, 'worker')}",
                is_warning=change == "left",
            )
        if self.room >= self._min_workers:
            self._had_room_at = time.monotonic()
        elif room_before >= self._min_workers:
            yield Notice(
                f"waiting at most {duration(self._wait_seconds)} for nodes with room for "
                f"{counted(self._min_workers, 'worker')}",
                is_warning=True,
            )
        elif time.monotonic() - self._had_room_at > self._wait_seconds:
            raise EdjeError(
                f"for {duration(self._wait_seconds)}, the Ray cluster has had room for only {self.room} of "
                f"{counted(self._min_workers, 'worker')}; add nodes to the cluster"
            )

    def find_lost(self, node_ids: Collection[str]) -> str | None:
        """Return one of the nodes if it left the cluster or if its machine does not answer, otherwise None."""
        if self.is_fixed:
            return None
        nodes = {node["NodeID"]: node for node in self._all() if node["NodeID"] in node_ids}
        unreached = {node_id for node_id, node in nodes.items() if node_id in self._lost or not node["Alive"]}
        lost = unreached or _silent([*nodes.values()])
        if not lost:
            return None
        self._lost |= lost
        self._refreshed_at = float("-inf")  # report the loss and the smaller room at once
        return min(lost)

    def _all(self) -> list[dict[str, Any]]:
        """Return all nodes that are or were in the cluster."""
        try:
            nodes: list[dict[str, Any]] = self._ray.nodes()
        except Exception as error:  # Ray documents no errors of this call
            raise EdjeError(f"the Ray cluster does not answer: {describe_error(error)}") from error
        return nodes

    def _read(self) -> None:
        alive = {node["NodeID"]: node for node in self._all() if node["Alive"]}
        self._lost = _silent([alive[node_id] for node_id in self._lost & alive.keys()])
        self._nodes = {node_id: node for node_id, node in alive.items() if node_id not in self._lost}
        self._refreshed_at = time.monotonic()


def _silent(nodes: Sequence[dict[str, Any]]) -> set[str]:
    """Return the ids of the nodes whose raylets do not accept connections. All nodes are asked at the same time."""
    if not nodes:
        return set()
    with ThreadPoolExecutor(min(len(nodes), _PROBE_THREADS), "edje-probe") as pool:
        return {node["NodeID"] for node, answers in zip(nodes, pool.map(_answers, nodes), strict=True) if not answers}


def _answers(node: dict[str, Any]) -> bool:
    """Return whether the raylet of a node accepts connections."""
    # Ray itself notices only after about 15 seconds that a raylet was killed.
    with contextlib.suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _PROBE_SECONDS).close()
        return True
    return False
