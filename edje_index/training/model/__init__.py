"""What a training step computes: initial weights, objectives and losses."""
