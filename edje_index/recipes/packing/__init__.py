"""Packs a trained bundle into a folder that is small enough for a Git repository.

A packed model contains only the differences from the base towers. The files of a packed model are:

    carried.json          packing of every tensor, and hashes of the base towers
    weights.safetensors   the packed tensors
    bundle/...            all files of the bundle except the weights
    MODEL_CARD.md         data, licence and figures of the model

Packing rounds the weights. Evaluate and publish the unpacked bundle, not the original.
"""
