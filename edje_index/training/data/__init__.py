"""Training data: captions, features, batches, hard negatives and sampling."""
