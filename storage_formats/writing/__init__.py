"""Writing of the files of an index: shards, conversions, copies and repairs."""
