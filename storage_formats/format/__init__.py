"""The files of an index: layout, manifest, rows table, receipts, tombstones, Zarr
metadata and checksums.
"""
