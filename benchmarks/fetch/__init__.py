"""Measures how fast blocks are fetched: by this project's reader, by compared
libraries, and by plain disk reads.
"""
