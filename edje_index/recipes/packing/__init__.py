"""Packs a trained bundle into a folder small enough for a repository.

A packed model holds only what differs from the base towers. Its files are:

    carried.json          packing of every tensor, and hashes of the base towers
    weights.safetensors   the packed tensors
    bundle/...            every file of the bundle without weights, including bundle.json
    MODEL_CARD.md         data, licence and figures of the model

Packing rounds the weights, so evaluate and publish the unpacked bundle.
"""
