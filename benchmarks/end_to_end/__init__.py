"""Compares whole search systems on the same embeddings, tokens and queries: recall, latency, memory and disk space."""
