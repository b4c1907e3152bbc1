"""Images: from the bytes of a file to the input of the vision tower."""
