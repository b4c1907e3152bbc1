"""What the routes of one service share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from anyio import CapacityLimiter

from edje_index import __version__
from pipelines.service.batching import Batcher
from pipelines.service.indexes import ServedIndexes
from pipelines.service.metrics import Metrics
from pipelines.service.settings import Limits

_FILE_THREADS = 4


@dataclass
class ServiceState:
    """The indexes, the queue of the model, the metrics, and the threads that read files."""

    indexes: ServedIndexes
    limits: Limits
    metrics: Metrics
    batcher: Batcher
    file_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_FILE_THREADS))

    @property
    def description(self) -> dict[str, Any]:
        """What `/info` answers."""
        return {
            "version": __version__,
            "indexes": [index.describe() for index in self.indexes],
            "limits": asdict(self.limits),
        }
