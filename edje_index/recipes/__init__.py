"""The steps that made the demo model: download base towers, train contrastive heads, pack the bundle.

Only the command-line interface imports this package.
"""
