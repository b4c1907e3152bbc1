"""The training loop, with tasks, workers, checkpoints, learning-rate schedule, evaluation and log."""
