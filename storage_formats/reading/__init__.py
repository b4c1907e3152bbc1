"""Reads records from shard files and objects, and embeddings from files.

`local_reads` reads records of an index on a file system, and chooses an engine for each
shard. `object_reads` reads records of an index on an object store. Both modules read
the records of a `request.ReadRequest`, which compares them with their checksums and
writes them to a sink, see `sinks`.
"""

from __future__ import annotations

from storage_formats.reading.local_reads import engines

__all__ = ["engines"]
