"""Makes the parts of the final score that the training loop does not train.

These are the pooled similarity, the hubness bank and the weights of the final score."""
