"""Reads, writes and makes model bundles."""
