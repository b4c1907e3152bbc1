"""Reads records from shard files and objects, and embeddings from files.

`local_reads` reads records of an index on a file system, and chooses an engine for each
shard. `object_reads` reads records of an index on an object store. Both modules read
the records of a `batch.Batch` and pass them to a `destination.Destination`, which
checks and decodes the records.
"""

from __future__ import annotations

from storage_formats.reading.local_reads import engines

__all__ = ["engines"]
