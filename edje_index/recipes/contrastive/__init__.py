"""Trains an embedding model: contrastive heads over a frozen timm image tower and a Hugging Face text tower.

Use this package where no CLIP weights can be downloaded. It combines an image tower and a text tower that were trained
separately into one open_clip model. Only the projection heads and, optionally, the last layers of the text tower are
trained on captions.

``towers`` builds the model, ``image_features`` and ``text_features`` run its frozen parts once, ``objective`` is the
loss, ``train`` is the training loop, and ``embedding_model`` runs all these steps.
"""
