"""Caption files: their formats, their records, and the index row of each captioned image."""
