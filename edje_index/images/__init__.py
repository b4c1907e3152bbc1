"""Images: from the bytes of a file to an upright RGB picture, and from a picture to the vision tower's input."""
