"""The index that the service searches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread

from edje_index.scoring.weights import TEXT_TO_IMAGE
from edje_index.search.token_index import TokenIndex
from pipelines.service.guard import logger
from storage_formats.errors import EdjeError
from storage_formats.format.rows import type_name

_WARM_UP_POOL = 32
WATCH_SECONDS = 2.0
"""Seconds between two reads of the manifest of the index."""


class ServedIndex:
    """The index that the service searches. Each stored precision is opened at its first use.

    Attributes:
        name: name of the index in requests and responses.
    """

    def __init__(self, name: str, index: TokenIndex) -> None:
        self.name = name
        self._opened: dict[str | None, TokenIndex] = {None: index, index.precision: index}  # by precision

    def at(self, precision: str | None) -> TokenIndex:
        """Return the index, opened with the tokens of `precision`. None means the default precision.

        Raises:
            UsageError: the index does not store this precision.
        """
        opened = self._opened  # stays one snapshot while `refresh` puts another in its place
        if precision is not None and precision not in opened:
            opened[precision] = opened[None].with_precision(precision)
        return opened[precision]

    def refresh(self) -> None:
        """Open the index again if the index on disk has changed.

        Raises:
            UsageError: the index was built again with another model, or cannot be opened.
            CorruptIndexError: the index is damaged.
        """
        changed = self._opened[None].at_current_snapshot()
        if changed is not self._opened[None]:
            self._opened = {None: changed, changed.precision: changed}

    def describe(self) -> dict[str, Any]:
        """Return the entry of the index in the response of `/info`."""
        index = self._opened[None]
        manifest, model = index.manifest, index.model
        weights = model.weights(TEXT_TO_IMAGE)
        return {
            "name": self.name,
            "rows": manifest.spec.rows,
            "indexed": manifest.counts.indexed,
            "block_shape": list(manifest.spec.block_shape),
            "embed_dim": manifest.spec.embed_dim,
            "precisions": list(manifest.spec.precisions),
            "precision": index.precision,
            "columns": {field.name: type_name(field.type) for field in index.rows.schema},
            "encoder_fingerprint": model.info.encoder_fingerprint,
            "bundle_fingerprint": model.fingerprint,
            "trained": model.trained,
            "dtype": str(model.joint.compute_dtype).removeprefix("torch."),
            "score": weights.described(),
            "weights": {part: weight for part, weight in weights.by_part().items() if weight},
        }


def open_served_index(
    path: Path, model: Path | None = None, *, device: str = "auto", dtype: str = "float32"
) -> ServedIndex:
    """Open the index at `path` and warm it up. Its name is the name of its directory without `.edje`.

    Args:
        path: directory of the index.
        model: the model bundle; None uses the bundle that built the index.
        device: "auto", "cpu" or "cuda".
        dtype: data type of the joint encoder's matrix products.

    Raises:
        UsageError: the index cannot be opened.
        ModelError: the bundle cannot be used with the index.
        CorruptIndexError: the index is damaged.
    """
    index = TokenIndex.open(path, model, device=device, dtype=dtype)
    # The first request is as fast as later ones if the whole model is loaded and has run.
    _ = index.model.image_encoder
    if index.manifest.counts.indexed:
        index.search("a photo of a dog on a beach", 1, _WARM_UP_POOL)
    return ServedIndex(path.resolve().name.removesuffix(".edje") or "index", index)


async def follow_changes(index: ServedIndex, threads: CapacityLimiter) -> None:
    """Check the index regularly, and open it again after a change. Runs until the task is cancelled."""
    before = ""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        problem = ""
        try:
            await to_thread.run_sync(index.refresh, limiter=threads)
        except (EdjeError, OSError, MemoryError) as error:
            problem = str(error) or type(error).__name__
        if problem and problem != before:
            logger.warning("the service keeps using the earlier snapshot of %s: %s", index.name, problem)
        before = problem
