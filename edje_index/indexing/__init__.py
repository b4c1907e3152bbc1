"""Indexing: the image encoder, the encoding of one shard, and the nearest-neighbour index."""
