"""Model bundles: read, write, import from a published checkpoint, create with random weights."""
