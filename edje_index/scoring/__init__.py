"""The final score of a caption and an image: a weighted sum of the parts in the
module `parts`.
"""
