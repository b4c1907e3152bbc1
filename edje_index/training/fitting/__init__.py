"""Makes the pooled similarity, the hubness bank and the weights of the final score, after the training loop."""
