"""How the demo model was made: base towers from the package index, contrastive heads, packed bundles.

Only the command line imports this package.
"""
