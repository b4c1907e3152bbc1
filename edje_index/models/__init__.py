"""The towers, adapters and joint encoders of a model. This module imports nothing, so
that the command line can read `MAX_FRAMES` quickly.
"""

MAX_FRAMES = 256
"""Largest number of frames per clip. All frames of a batch are in memory at once."""
