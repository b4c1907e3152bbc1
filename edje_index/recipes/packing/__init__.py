"""Packing of a trained bundle into a folder small enough for a repository.

A packed model holds only what differs from the base towers. ``pack`` writes it, ``unpack`` restores the bundle from it
and the base towers of ``edje-index model fetch-towers``, and ``tensors`` packs one tensor. The folder:

    carried.json          packing of every tensor, hashes of the base towers' weights
    weights.safetensors   the packed tensors
    bundle/...            every file of the bundle that holds no weights, bundle.json included
    MODEL_CARD.md         data, licence and figures of the model

Packing rounds, so evaluate and publish the unpacked bundle. ``bundle/bundle.json`` holds its fingerprint, and unpacking
fails if the result has a different one.
"""
