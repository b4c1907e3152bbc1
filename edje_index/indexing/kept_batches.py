"""Keeps the encoded batches of unfinished shards in `build/batches/`, so that a build
that was stopped goes on inside a shard.

The files are a cache: a file that is missing, damaged or cannot be written costs time,
but changes no byte of the index. The end of the change removes them with `build/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage_formats.arrays import Floats, Ints
from storage_formats.codecs import BF16, Blocks
from storage_formats.format.places import Place
from storage_formats.format.rows import RowEntry
from storage_formats.remote.objects import ObjectStoreError


@dataclass(frozen=True)
class Batch:
    """The outputs of the model for one batch of a shard.

    Attributes:
        ready: int64 [k], positions in the batch of the images that were encoded.
        tokens: bfloat16 [k, m, d].
        embeddings: float32 [k, embed_dim].
    """

    ready: Ints
    tokens: Blocks
    embeddings: Floats


class KeptBatches:
    """The kept batches of one shard.

    Args:
        identity: text that determines the outputs of the model, apart from the inputs.
            Batches that were kept with another identity are not used.
    """

    def __init__(self, place: Place, shard: int, identity: str) -> None:
        self._place = place
        self._is_empty = True
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._folder = place.build / "batches" / f"{shard:08d}-{key}"

    def read(
        self, batches: Sequence[range], entries: Sequence[RowEntry]
    ) -> dict[int, Batch]:
        """Return those of `batches`, ranges of positions in the shard, that are kept
        and sound, keyed by their first position. The `entries` of their rows become as
        they were when the batch was kept.
        """
        kept = {}
        names = set[str]()
        with contextlib.suppress(ObjectStoreError):
            names = {path.name for path in self._place.names(self._folder)}
        self._is_empty = not names
        for rows in batches:
            if _name(rows) in names:
                with contextlib.suppress(
                    OSError,
                    ObjectStoreError,
                    ValueError,
                    KeyError,
                    EOFError,
                    zipfile.BadZipFile,
                ):
                    data = self._place.read(self._folder / _name(rows)) or b""
                    # The file is a zip, whose members have checksums.
                    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                        batch = Batch(
                            arrays["ready"],
                            arrays["tokens"].view(BF16),
                            arrays["embeddings"],
                        )
                        values = json.loads(arrays["rows"].tobytes())
                    for entry, of_row in zip(
                        entries[rows.start :], values, strict=False
                    ):
                        vars(entry).update(of_row)
                    kept[rows.start] = batch
        return kept

    def write(
        self,
        positions: range,
        entries: Sequence[RowEntry],
        batch: Batch,
    ) -> None:
        """Keep the batch at `positions` of the shard."""
        # The plan of the build gives the bytes of the URI, which JSON cannot represent.
        rows = [{**vars(entry)} for entry in entries]
        for row in rows:
            del row["uri_raw"]
        text = json.dumps(rows).encode()
        buffer = io.BytesIO()
        np.savez(
            buffer,
            rows=np.frombuffer(text, np.uint8),
            ready=batch.ready,
            tokens=batch.tokens.view(np.uint16),
            embeddings=batch.embeddings,
        )
        self._is_empty = False
        with contextlib.suppress(OSError, ObjectStoreError):
            self._place.write(self._folder / _name(positions), buffer.getvalue())

    def remove(self) -> None:
        """Remove the kept batches of the shard, which is finished."""
        if not self._is_empty:
            self._place.remove(self._place.names(self._folder))


def kept_rows(place: Place) -> int:
    """Return the number of rows in the kept batches of all shards."""
    paths = place.names(place.build / "batches")
    bounds = (path.stem.split("-") for path in paths)
    return sum(int(stop) - int(start) for start, stop in bounds)


def _name(rows: range) -> str:
    return f"{rows.start}-{rows.stop}.npz"
