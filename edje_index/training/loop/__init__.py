"""The training loop: workers, checkpoints, learning-rate schedule and log."""
