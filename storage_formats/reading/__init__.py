"""Engines that read records of shard files, behind one interface.

`base` defines the interface. `buffered`, `mapped` and `queued` are the engines; `queued` uses the kernel interfaces in
`ring` (io_uring) and `aio`. `engine_selection` chooses an engine for each read, and `destination` turns records into
blocks. `checksums` finds damaged records. The engines use `files`, `memory`, `page_cache` and `admission`.
"""

from __future__ import annotations

from storage_formats.reading.engine_selection import engines

__all__ = ["engines"]
