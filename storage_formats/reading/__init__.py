"""Read engines, which read records from shard files.

`base` defines the interface of an engine. The modules `buffered`, `mapped` and `queued` contain the engines.
`engine_selection` selects an engine for each record. `object_engine` contains the engine for object stores.
"""

from __future__ import annotations

from storage_formats.reading.engine_selection import engines

__all__ = ["engines"]
