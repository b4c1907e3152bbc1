"""The commands of `edje-index bench`, one per module."""
