"""A trained bundle small enough for a repository: what differs from the base towers, and nothing else.

``carry`` packs a bundle into such a folder, ``assemble`` makes the bundle again from it and the towers of
``edje-index fetch-towers``; ``tensors`` is how one tensor is packed. The folder:

    carried.json          how every tensor is packed, the hashes of the towers' weights
    weights.safetensors   the packed tensors
    bundle/...            every file of the bundle that holds no weights, bundle.json among them
    MODEL_CARD.md         what the model is: data, licence, figures

Packing rounds. The bundle to evaluate and to publish is therefore the one that comes out of ``assemble``: its
fingerprint is in ``bundle/bundle.json``, and ``assemble`` fails where it does not come to the same bytes.
"""
