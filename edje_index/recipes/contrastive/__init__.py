"""Trains an embedding model: contrastive heads over a frozen image tower and a text tower.

Use this package where no CLIP weights can be downloaded. It combines two towers that were trained separately into one
open_clip model. Only the heads and, optionally, the last layers of the text tower are trained on captions.
"""
