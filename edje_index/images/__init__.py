"""Images: bytes to checked, upright RGB pictures, and pictures to the input of the vision tower."""
