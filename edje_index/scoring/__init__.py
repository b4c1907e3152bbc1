"""The final score: its parts, their weights, and the only sum of them."""
