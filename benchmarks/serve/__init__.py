"""`edje-index bench serve`: open-loop load on a real service, its knee, and an overload with hostile clients."""
