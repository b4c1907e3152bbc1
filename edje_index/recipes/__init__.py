"""The steps that made the shipped model: download the base towers, train contrastive heads, pack the bundle.

Only the command-line interface imports this package.
"""
