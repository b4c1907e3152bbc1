"""The training loop: tasks, workers, checkpoints, learning-rate schedule, evaluation and log."""
