"""The state that all routes of the service share."""

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
    """The state that all routes share.

    Attributes:
        indexes: the open indexes.
        limits: limits on the size and duration of requests.
        metrics: metrics for Prometheus.
        batcher: queue of requests for the model.
        file_threads: limiter for the number of threads that read files.
    """

    indexes: ServedIndexes
    limits: Limits
    metrics: Metrics
    batcher: Batcher
    file_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_FILE_THREADS))

    @property
    def description(self) -> dict[str, Any]:
        """The response to `/info`."""
        # The members from `model_id` to `tokenization_workers` are for clients of text-embeddings-inference.
        default, limits = self.indexes.default.describe(), self.limits
        return {
            "version": __version__,
            "sha": None,
            "docker_label": None,
            "model_id": default["name"],
            "model_sha": default["bundle_fingerprint"],
            "model_dtype": default["dtype"],
            "model_type": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
            "max_concurrent_requests": limits.waiting,
            "max_input_length": limits.query_letters,
            "max_batch_tokens": limits.batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": limits.documents,
            "tokenization_workers": 1,
            "indexes": [index.describe() for index in self.indexes],
            "limits": asdict(limits),
        }
