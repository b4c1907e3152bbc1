"""What is fitted after the last step: pooled similarity, hubness bank, score weights."""
