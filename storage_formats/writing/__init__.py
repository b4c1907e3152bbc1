"""Writing and changing of indexes."""
