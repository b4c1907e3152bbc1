"""The final score: a weighted sum of named parts.

`parts` computes each part for pairs of a caption and an image. `weights` holds one weight per part and direction.
`final_score` computes the weighted sum, for search, evaluation, the quantization report and weight fitting.
"""
