"""Training data: captions, features, batches, negatives, sampling."""
