"""Images: from the bytes of a file to an upright RGB image, and from the RGB image to the input of the vision tower."""
