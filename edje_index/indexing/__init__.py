"""Indexing: the image encoder of a worker, the encoding of one shard, and the FAISS index."""
