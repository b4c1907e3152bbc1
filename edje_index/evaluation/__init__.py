"""Measures the recall of an index on captioned images.

Recall is measured for the embeddings alone, and after re-ranking, for each pool size
and precision.
"""
