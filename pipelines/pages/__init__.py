"""Self-contained HTML pages: results of a search, and the report of an index."""
