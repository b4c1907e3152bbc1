"""The indexes that the service searches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edje_index.images.thumbnails import Thumbnail, read_thumbnails
from edje_index.scoring.weights import TEXT_TO_IMAGE
from edje_index.search.row_filters import filter_schema
from edje_index.search.token_index import TokenIndex
from pipelines.service.errors import ServiceError
from storage_formats.errors import RowIdError, UsageError
from storage_formats.format.rows import type_name

_WARM_UP_POOL = 32


class ServedIndex:
    """One index that the service searches. Each stored precision is opened at its first use.

    Attributes:
        name: name of the index in requests and responses.
    """

    def __init__(self, name: str, index: TokenIndex) -> None:
        self.name = name
        self._by_precision = {index.precision: index}
        self._default = index
        self._lock = threading.Lock()

    def at(self, precision: str | None) -> TokenIndex:
        """Return the index, opened with the tokens of `precision`. None means the default precision.

        Raises:
            UsageError: the index does not store this precision.
        """
        if precision is None:
            return self._default
        with self._lock:
            if precision not in self._by_precision:
                self._by_precision[precision] = self._default.with_precision(precision)
            return self._by_precision[precision]

    def refresh(self) -> None:
        """Open the index again if the index on disk has changed.

        Raises:
            UsageError: the index was built again with another model, or cannot be opened.
            CorruptIndexError: the index is damaged.
        """
        changed = self._default.at_current_snapshot()
        if changed is not self._default:
            with self._lock:
                self._default, self._by_precision = changed, {changed.precision: changed}

    def warm_up(self) -> None:
        """Load all parts of the model and run one search, so that the first request is as fast as later requests."""
        _ = self._default.model.image_encoder
        if self._default.manifest.counts.indexed:
            self._default.search("a photo of a dog on a beach", 1, _WARM_UP_POOL)

    def thumbnail(self, row_id: int) -> Thumbnail:
        """Read the thumbnail of a row.

        Raises:
            ServiceError: status 404 if the row does not exist.
        """
        try:
            return read_thumbnails(self._default.root, [row_id])[0]
        except RowIdError as error:
            raise ServiceError(404, str(error)) from error

    def describe(self) -> dict[str, Any]:
        """Return the entry of the index in the response of `/info`."""
        manifest, model = self._default.manifest, self._default.model
        weights = model.weights(TEXT_TO_IMAGE)
        return {
            "name": self.name,
            "rows": manifest.spec.rows,
            "indexed": manifest.counts.indexed,
            "block_shape": list(manifest.spec.block_shape),
            "embed_dim": manifest.spec.embed_dim,
            "precisions": list(manifest.spec.precisions),
            "precision": self._default.precision,
            "columns": {field.name: type_name(field.type) for field in filter_schema(self._default.committed)},
            "encoder_fingerprint": model.info.encoder_fingerprint,
            "bundle_fingerprint": model.fingerprint,
            "trained": model.trained,
            "dtype": str(model.joint.compute_dtype).removeprefix("torch."),
            "score": weights.described(),
            "weights": {part: weight for part, weight in weights.by_part().items() if weight},
        }


class ServedIndexes:
    """All indexes that the service searches. The first index is the default."""

    def __init__(self, indexes: Sequence[ServedIndex]) -> None:
        self._by_name: Mapping[str, ServedIndex] = {index.name: index for index in indexes}
        self.default = indexes[0]

    def __iter__(self) -> Iterator[ServedIndex]:
        return iter(self._by_name.values())

    def get(self, name: str | None) -> ServedIndex:
        """Return the index called `name`, or the default index if `name` is None.

        Raises:
            ServiceError: status 404 if no index has this name.
        """
        if name is None:
            return self.default
        if name not in self._by_name:
            raise ServiceError(404, f"there is no such index; choose one of: {', '.join(self._by_name)}")
        return self._by_name[name]

    def named_or_default(self, name: str | None) -> ServedIndex:
        """Return the index called `name`, or the default index if no index has this name."""
        # Clients of other services send the name of a model, which selects the default index.
        return self._by_name.get(name or "", self.default)


def open_indexes(
    paths: Sequence[Path], model: Path | None = None, *, device: str = "auto", dtype: str = "float32"
) -> ServedIndexes:
    """Open the indexes at `paths` and warm them up.

    The name of an index is the name of its directory without `.edje`.

    Args:
        paths: directories of the indexes; the first index is the default.
        model: bundle for all indexes; None uses the bundle that built each index.
        device: "auto", "cpu" or "cuda".
        dtype: data type of the joint encoder's matrix products.

    Raises:
        UsageError: an index cannot be opened, or two indexes have the same name.
        ModelError: a bundle cannot be used with its index.
        CorruptIndexError: an index is damaged.
    """
    names = [path.resolve().name.removesuffix(".edje") or "index" for path in paths]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"two indexes have the name {repeated[0]!r}; rename the directory of one index")
    opened = [
        ServedIndex(name, TokenIndex.open(path, model, device=device, dtype=dtype))
        for name, path in zip(names, paths, strict=True)
    ]
    for index in opened:
        index.warm_up()
    return ServedIndexes(opened)
