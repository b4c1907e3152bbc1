"""Measures `edje-index serve` under load, and during an overload with hostile clients."""
