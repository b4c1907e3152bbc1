"""Reading of records from shard files and objects, and of embeddings.

`local_reads` reads an index on a file system, and chooses an engine for each shard.
`object_reads` reads an index on an object store. Both read a
`batch.Batch` into a `destination.Destination`, which checks and decodes the records.
"""

from __future__ import annotations

from storage_formats.reading.local_reads import engines

__all__ = ["engines"]
