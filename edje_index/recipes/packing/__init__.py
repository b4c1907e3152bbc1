"""Packs a trained bundle into a folder small enough for a repository.

A packed model holds only what differs from the base towers that ``edje-index model fetch-towers`` downloads. ``pack``
writes a packed model. ``unpack`` restores the bundle from the packed model and the base towers. ``tensors`` packs one
tensor. The files of a packed model are:

    carried.json          packing of every tensor, and hashes of the weights of the base towers
    weights.safetensors   the packed tensors
    bundle/...            every file of the bundle that holds no weights, including bundle.json
    MODEL_CARD.md         data, licence and figures of the model

Packing rounds the weights, so evaluate and publish the unpacked bundle. ``bundle/bundle.json`` holds the fingerprint of
the unpacked bundle. Unpacking fails if its result has another fingerprint.
"""
