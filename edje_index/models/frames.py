"""The largest number of frames of a clip. This module imports nothing, so that the command line can read it."""

MAX_FRAMES = 256
"""Largest number of frames per clip. All frames of a batch are in memory at once."""
