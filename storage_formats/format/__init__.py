"""The format of an index: layout, manifest, rows, receipts, Zarr metadata, checksums."""
