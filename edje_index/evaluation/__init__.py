"""Evaluates an index: measures its recall on captioned images, compares its precisions,
and explains its tokens and hits.

Recall is measured for the embeddings alone, and after re-ranking, for each pool size
and precision.
"""
