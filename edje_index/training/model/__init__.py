"""What a training step computes: start weights, objectives and losses."""
