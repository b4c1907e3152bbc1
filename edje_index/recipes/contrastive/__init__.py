"""Trains an embedding model from an image tower and a text tower that were trained separately.

Use this package where no CLIP weights can be downloaded. The result is an open_clip model. Training updates contrastive
heads on both towers, and optionally the last layers of the text tower.
"""
