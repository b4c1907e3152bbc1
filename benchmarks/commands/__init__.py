"""The commands of `edje-index bench`, a module for what belongs together."""
