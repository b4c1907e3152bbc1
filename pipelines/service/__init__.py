"""The HTTP service of `edje-index serve`: search, re-ranking, embeddings, tokens
and thumbnails of indexes.
"""
