"""Ways to read records of shard files, behind one interface.

`base` says what an engine is; `buffered`, `mapped` and `queued` are the engines, over `ring` and `aio`; `choice`
picks among them; `landing` brings records to blocks; `files`, `memory`, `page_cache` and `admission` serve these.
"""

from __future__ import annotations

from storage_formats.reading.engine_selection import engines

__all__ = ["engines"]
