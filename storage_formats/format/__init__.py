"""The files of an index: their paths, contents and checksums (SPEC.md)."""
