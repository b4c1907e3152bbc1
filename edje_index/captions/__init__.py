"""Reads caption files in common formats, and finds the index row of each captioned
image.
"""
