"""The final score: named parts, their weights, and the only place that sums them.

`parts` computes each part for pairs of a caption and an image. `weights` holds one weight per part and direction.
`final_score` multiplies and adds. Search, evaluation, the quantization report and weight fitting all call it.
"""
