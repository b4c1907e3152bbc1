"""Plans builds and changes: determines the settings and the list of inputs before the workers start."""
