"""Searches an index: embeds the query, finds the nearest rows, reads their tokens,
and re-ranks the rows.
"""
