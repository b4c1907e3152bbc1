"""Fits the parts of the final score that gradients do not train: pooled similarity, hubness bank and score weights."""
