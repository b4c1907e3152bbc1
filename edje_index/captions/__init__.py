"""Reads caption files in common formats, and finds the index rows of the captioned images."""
