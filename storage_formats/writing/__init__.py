"""Writing an index: shards, staging, commit, and conversion to other precisions."""
