"""The final score of a caption and an image: a weighted sum of named parts.

The module `parts` computes the parts. `weights` defines one weight per part and direction. `final_score` computes the
sum for search, evaluation, the quantization report and weight fitting.
"""
