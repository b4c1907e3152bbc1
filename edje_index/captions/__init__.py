"""Captions: files of captions in common formats, and the index rows of the images they describe."""
