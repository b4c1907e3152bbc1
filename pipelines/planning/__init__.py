"""Plans a build or an append: fixes the settings and the list of inputs before the workers start."""
