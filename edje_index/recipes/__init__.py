"""Recipes of the demo model: contrastive heads, base towers from the package index, packed bundles.

Nothing outside this package and the command line needs it.
"""
