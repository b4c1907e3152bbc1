"""Measures fetch throughput of this project's reader, of compared libraries and of the disk."""
