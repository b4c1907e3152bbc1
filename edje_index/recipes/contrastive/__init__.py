"""A dual encoder of one's own: contrastive heads over a frozen timm image tower and a Hugging Face text tower.

Where no CLIP is at hand, image and text towers that were trained apart become an embedding model: only their
projection heads, and if asked the last layers of the text tower, are trained on captions. The result is an open_clip
model whose heads are open_clip's own modules. ``towers`` builds it, ``image_features`` and ``text_features`` run the
frozen parts once, ``objective`` is the loss, ``train`` the loop, ``command`` the whole.
"""
