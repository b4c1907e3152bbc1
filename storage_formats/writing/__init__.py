"""Writing an index: shards, staging, commit, conversion between precisions."""
