"""Encodes images and shards, and builds and searches the nearest-neighbour index."""
