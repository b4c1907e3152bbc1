"""The format on disk: paths, manifest, rows table, receipts, Zarr metadata, checksums."""
