"""Train an embedding model: contrastive heads over a frozen timm image tower and a Hugging Face text tower.

Use it where no CLIP weights can be downloaded. Image and text towers that were trained apart become one open_clip
model: only the projection heads and, optionally, the last layers of the text tower are trained on captions.

``towers`` builds the model, ``image_features`` and ``text_features`` run its frozen parts once, ``objective`` is the
loss, ``train`` is the loop, and ``embedding_model`` runs all of them.
"""
